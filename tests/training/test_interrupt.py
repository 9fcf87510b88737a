from __future__ import annotations

import os
import signal
import threading

import pytest

from daf.training.loop import InterruptWatch


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_interrupts(number: signal.Signals) -> None:
    with InterruptWatch() as watch:
        assert not watch.requested
        os.kill(os.getpid(), number)
        assert watch.requested
        with pytest.raises(KeyboardInterrupt, match=number.name):
            os.kill(os.getpid(), number)


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with InterruptWatch():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_outside_the_main_thread_handlers_stay_as_they_are() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def body() -> None:
        with InterruptWatch():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [before]
