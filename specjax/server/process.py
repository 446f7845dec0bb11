"""Settings of the Python process that suit a server. They hold while any server of the process runs."""

import contextlib
import gc
import sys
from collections.abc import Iterator

# Seconds after which a thread of this process lets another one run Python. The engine's thread and the event loop take
# turns several times a round, and by Python's default, 5 ms, one could wait for the other for as long as a round takes.
SWITCH_INTERVAL = 0.0003

_servers = 0  # the number of servers that run now
_usual, _frozen = 0.0, 0  # the switch interval, and the number of frozen objects, before the first server


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Shortens the turns of threads. At the end of the last server all settings are as they were before the first."""
    global _servers, _usual, _frozen
    if not _servers:
        _usual, _frozen = sys.getswitchinterval(), gc.get_freeze_count()
        sys.setswitchinterval(SWITCH_INTERVAL)
    _servers += 1
    try:
        yield
    finally:
        _servers -= 1
        if not _servers:
            sys.setswitchinterval(_usual)
            if not _frozen:
                gc.unfreeze()


def collect_for_the_last_time() -> None:
    """Has Python's collector leave alone what was made so far: modules and programs, which stay.

    Else the collector looks through them again and again, for a tenth of a second or longer, in which nothing decodes.
    """
    gc.collect()
    gc.freeze()
