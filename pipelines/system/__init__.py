"""What a program needs of its machine: files and object stores, secrets, signals, output streams, memory and core limits.

storage         files of the local disk and of object stores, and locks on them
credentials     redacts passwords and keys, and restores them
signals         termination signals as exceptions, and these as exit codes;  `output`: streams that never raise
limits          cores and memory that a process may use;  `machine_table`: measurements of this machine
service_thread  a background thread that survives its errors;  `node_folder`: folders on a node's disk
hub             models of the Hugging Face hub
errors          the error of a wrong setting, which all wings raise
"""

import gc
import os

# A copy of a process collects nothing that it has from it: references to objects of Ray would answer on the sockets that
# both share, and the next call of Ray in the process itself would wait for ever.
os.register_at_fork(after_in_child=gc.freeze)
