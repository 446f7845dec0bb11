"""How the processes of a replica find each other: JAX's coordination service tells where rank 0 listens."""

import hmac
import json
import os
import secrets
import socket
import time
from typing import Any

import jax

from specjax.distributed.channel import Channel
from specjax.distributed.replica import Replica

PLACE = "specjax/replica"  # the key under which rank 0 says where it listens
HELLO_BYTES, HELLO_SECONDS = 4096, 10  # the most of a connection from a process that rank 0 does not know yet


def join(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    silence: float = 20,
    stuck: float = 600,
    initialization_timeout: int = 300,
) -> Replica:
    """Makes this process a part of a replica: several processes, one model. Call it before anything else of JAX.

    Under Slurm, Open MPI and on other clusters that ``jax.distributed.initialize`` knows, no argument is needed.
    SIGTERM keeps its usual effect, since JAX's preemption service is switched off. The connections are neither
    encrypted nor protected against others in the network, as JAX's own: keep them in a private network.

    Args:
      coordinator_address, num_processes, process_id, initialization_timeout: as in ``jax.distributed.initialize``.
      silence: seconds without any message of a rank, after which all ranks end.
      stuck: seconds in which no rank starts or ends a call, while calls are on the way, after which all ranks end. The
        first calls compile, so this is minutes.

    Returns:
      This process's part. On rank 0, ``specjax.Engine(lm, calls=replica.calls())`` is an engine over all processes; the
      other ranks make the same engine and call :meth:`Replica.follow`.

    Raises:
      ValueError: no cluster was detected and the arguments don't say which processes there are; or a process runs
        another version of JAX.
      RuntimeError: JAX has used its devices before, or a process did not come in time.
    """
    jax.config.update("jax_enable_preemption_service", False)  # it would keep SIGTERM for itself
    given = coordinator_address, num_processes, process_id
    try:
        jax.distributed.initialize(*given, initialization_timeout=initialization_timeout)
    except ValueError as problem:
        raise ValueError(
            f"the processes can't find each other: {problem}; outside of Slurm, Open MPI and the like give the address "
            "of process 0, the number of processes, and the number of this one, counted from 0"
        ) from problem
    rank, size = jax.process_index(), jax.process_count()
    me = f"{socket.gethostname()}, process {os.getpid()}"
    hello = {"rank": rank, "name": me, "version": jax.__version__}
    if rank == 0:
        channels, names = _gather(size, hello, initialization_timeout)
    else:
        channels, names = _knock(hello, initialization_timeout)
    return Replica(rank, channels, names, silence, stuck)


def _gather(size: int, hello: dict[str, Any], timeout: float) -> tuple[dict[int, Channel], dict[int, str]]:
    """Rank 0 waits until all others have come. -> the channels, and the names of all ranks."""
    token, names = secrets.token_hex(16), {0: hello["name"]}
    channels: dict[int, Channel] = {}
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    end = time.monotonic() + timeout
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as listening:
        _service().key_value_set(PLACE, json.dumps([listening.getsockname()[1], token]))
        while len(channels) < size - 1:
            listening.settimeout(max(end - time.monotonic(), 0.001))
            try:
                connection, _ = listening.accept()
            except TimeoutError as problem:
                missing = sorted(set(range(1, size)) - set(channels))
                raise RuntimeError(
                    f"ranks {missing} of {size} did not come to rank 0 in {timeout} s; look at their output, or give "
                    "them more time by initialization_timeout"
                ) from problem
            found = _introduced(connection, token)
            if found is None:
                continue
            channel, head = found
            if head["version"] != hello["version"]:
                raise ValueError(
                    f"rank {head['rank']} ({head['name']}) runs jax {head['version']}, and rank 0 runs "
                    f"{hello['version']}; install one version everywhere"
                )
            channels[head["rank"]], names[head["rank"]] = channel, head["name"]
    for channel in channels.values():
        channel.send({"names": sorted(names.items())})
    return channels, names


def _introduced(connection: socket.socket, token: str) -> tuple[Channel, dict[str, Any]] | None:
    """A rank's channel, and what the rank said first. None: a stranger has come, and the connection is closed."""
    connection.settimeout(HELLO_SECONDS)
    channel = Channel(connection)
    try:
        head, _ = channel.receive(HELLO_BYTES)
        known = hmac.compare_digest(head["token"], token)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # no message, or no message of ours
        known = False
    if not known:
        channel.close()
        return None
    connection.settimeout(None)
    return channel, head


def _knock(hello: dict[str, Any], timeout: float) -> tuple[dict[int, Channel], dict[int, str]]:
    """Another rank than 0 goes to rank 0. -> the channel, and the names of all ranks."""
    from jax._src import distributed  # JAX has no public name for the address that it has detected

    host = str(distributed.global_state.coordinator_address).rsplit(":", 1)[0].strip("[]")
    port, token = json.loads(_service().blocking_key_value_get(PLACE, int(timeout * 1000)))
    try:
        connection = socket.create_connection((host, port), timeout)
    except OSError as problem:
        raise RuntimeError(f"rank 0 can't be reached at {host}, port {port}: {problem}") from problem
    connection.settimeout(None)
    channel = Channel(connection)
    channel.send({**hello, "token": token})
    head, _ = channel.receive()
    return {0: channel}, dict(head["names"])


def _service() -> Any:
    """The client of JAX's coordination service. JAX has no public name for it; orbax takes it from here too."""
    from jax._src import distributed

    return distributed.global_state.client
