"""Signals that end a command are exceptions, also where a library raises its own for them."""

import signal

import pytest

from raystride.pipelines.system.signals import HungUp, Terminated, exit_code_of, raise_on_signals


def _raise_signal(number: signal.Signals, replaced: bool) -> None:
    """Signals this process within the block, as a command is signalled; `replaced`: in a call of Ray's, which is C++."""
    with raise_on_signals():
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            if replaced:
                raise KeyboardInterrupt from None
            raise


@pytest.mark.parametrize(("number", "kind", "code"), [(signal.SIGTERM, Terminated, 143), (signal.SIGHUP, HungUp, 129)])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_signal_is_the_exception_of_its_name_even_if_a_library_raises_its_own(
    number: signal.Signals, kind: type[KeyboardInterrupt], code: int, replaced: bool
) -> None:
    before = signal.getsignal(number)
    with pytest.raises(kind) as raised:
        _raise_signal(number, replaced)
    assert exit_code_of(raised.value) == code
    assert signal.getsignal(number) is before


def test_ctrl_c_stays_ctrl_c() -> None:
    with pytest.raises(KeyboardInterrupt) as raised, raise_on_signals():
        raise KeyboardInterrupt
    assert exit_code_of(raised.value) == 130
