"""Signals as a terminal's shell leaves them, in what a shell has started in the background.

restore_default_signals()    # before anything is started, which inherits the handlers
"""

import signal
import threading


def restore_default_signals() -> None:
    """Gives SIGINT, SIGTERM and SIGHUP their default handlers where they are ignored.

    A script's `&`, cron and `nohup` start a process with some of them ignored, and whatever it starts inherits that.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # Python sets handlers in the main thread alone
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in defaults.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
