"""Folders of this node for copies of what lies far away or packed, which are the user's and the node's alone.

    place = node_folder("-unpacked")                          # /tmp/raystride-1000-node7-unpacked
    open_private(place)

Not below the home directory, which on many clusters all nodes share: one node would tear away what another has mapped.
"""

import os
import socket
import stat
import tempfile
from pathlib import Path

from raystride.pipelines.config import SettingError

PLACE = "RAYSTRIDE_CACHE"
"""The variable that names another place."""


def node_folder(suffix: str = "") -> Path:
    """Returns a path below `$RAYSTRIDE_CACHE` or the system's temporary folder, with host and user in its name.

    Nodes may share the disk of `$RAYSTRIDE_CACHE`, and users may. `suffix` tells kinds of copies apart.
    """
    if root := os.environ.get(PLACE):
        return Path(f"{root.rstrip('/')}{suffix}").expanduser().absolute() / f"{socket.gethostname()}-{os.getuid()}"
    return Path(f"{tempfile.gettempdir()}/raystride-{os.getuid()}-{socket.gethostname()}{suffix}").absolute()


def open_private(folder: Path) -> None:
    """Makes a folder that nobody else may enter, or takes away others' rights to it, since what lies in it is believed.

    Raises SettingError if it is another user's or a link, OSError if it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        # What is looked at is what was opened: a path may lead elsewhere a moment later.
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        if not folder.is_symlink():
            raise
        raise _refusal(folder, "is a link") from None
    try:
        found = os.fstat(opened)
        if found.st_uid != os.getuid():
            raise _refusal(folder, "is another user's")
        if stat.S_IMODE(found.st_mode) != 0o700:
            os.fchmod(opened, 0o700)
    finally:
        os.close(opened)


def _refusal(folder: Path, fault: str) -> SettingError:
    message = f"{folder}, where copies are kept, {fault}: name another place by ${PLACE}"
    return SettingError(message, setting=PLACE, value=str(folder))
