"""Node-local folders, private to the user, for copies of remote or packed files.

    place = node_folder("-unpacked")                          # /tmp/raystride-1000-node7-unpacked
    ensure_private(place)

They are not below the home directory, which many clusters share between nodes: a node would delete files that another has
mapped.
"""

import os
import socket
import stat
import tempfile
from pathlib import Path

from raystride.pipelines.system.errors import SettingError

CACHE_VARIABLE = "RAYSTRIDE_CACHE"
"""The environment variable that overrides the location."""


def node_folder(suffix: str = "") -> Path:
    """Returns a path below `$RAYSTRIDE_CACHE` or the system's temporary folder, with host and user in its name.

    Nodes may share the disk of `$RAYSTRIDE_CACHE`, and users may. `suffix` distinguishes kinds of copies.
    """
    if root := os.environ.get(CACHE_VARIABLE):
        return Path(f"{root.rstrip('/')}{suffix}").expanduser().absolute() / f"{socket.gethostname()}-{os.getuid()}"
    return Path(f"{tempfile.gettempdir()}/raystride-{os.getuid()}-{socket.gethostname()}{suffix}").absolute()


def ensure_private(folder: Path) -> None:
    """Creates a folder with mode 0700, or sets that mode, since its content is trusted.

    Raises SettingError if it is another user's or a link, OSError if it cannot be created.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        # The open folder is checked, not its path, which may lead elsewhere a moment later.
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        if not folder.is_symlink():
            raise
        raise _unsafe_folder_error(folder, "is a link") from None
    try:
        found = os.fstat(opened)
        if found.st_uid != os.getuid():
            raise _unsafe_folder_error(folder, "is another user's")
        if stat.S_IMODE(found.st_mode) != 0o700:
            os.fchmod(opened, 0o700)
    finally:
        os.close(opened)


def _unsafe_folder_error(folder: Path, fault: str) -> SettingError:
    message = f"{folder}, where copies are kept, {fault}: name another place by ${CACHE_VARIABLE}"
    return SettingError(message, setting=CACHE_VARIABLE, value=str(folder))
