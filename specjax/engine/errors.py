"""The errors of an engine that is full, closed or broken."""


class QueueFullError(RuntimeError):
    """As many requests wait as the engine allows. Nothing of the new request was kept: submit it again later."""


class EngineClosedError(RuntimeError):
    """The engine is closed, or its thread has ended by an error, which is the cause of this error."""
