"""Where this node keeps copies of what lies far away or packed: a folder that is the user's and the node's alone.

    place = node_folder("-unpacked")                          # /tmp/raystride-1000-node7-unpacked
    open_private(place)

Not below the home directory, which on many clusters all nodes share: one node would tear away what another has mapped.
"""

import os
import socket
import tempfile
from pathlib import Path

from raystride.pipelines.config import SettingError

PLACE = "RAYSTRIDE_CACHE"
"""The variable that names another place."""


def node_folder(suffix: str = "") -> Path:
    """The folder's path, in `$RAYSTRIDE_CACHE` or the system's temporary folder; `suffix` tells kinds of copies apart."""
    own = f"{tempfile.gettempdir()}/raystride-{os.getuid()}-{socket.gethostname()}"
    return Path(f"{(os.environ.get(PLACE) or own).rstrip('/')}{suffix}").expanduser().absolute()


def open_private(folder: Path) -> None:
    """Makes a folder that nobody else may enter, since what lies in it is believed.

    Raises SettingError where it is another user's, OSError where it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        message = f"{folder}, where copies are kept, is another user's: name another place by ${PLACE}"
        raise SettingError(message, setting=PLACE, value=str(folder))
