"""One model over several processes: rank 0 decides, and all ranks dispatch the same programs."""

from specjax.distributed.meeting import join
from specjax.distributed.replica import Replica

__all__ = ["Replica", "join"]
