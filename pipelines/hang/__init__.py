"""Groups of workers that hang: noticed, looked at from outside, and ended.

heartbeat   each worker's signs of life, and the table of them
detector    from those: does the group hang, and who holds it up
stack_dump  where a process stands, read from outside it
watch       all of it in the background of the driver
"""
