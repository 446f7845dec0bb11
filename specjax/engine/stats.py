"""What an engine has done so far, and what it holds now."""

import dataclasses

from specjax.engine.ticket import Ticket


@dataclasses.dataclass
class Stats:
    """Counts since the engine began, and the present state."""

    # Requests that have a slot, and requests that wait for one.
    running: int = 0
    waiting: int = 0
    # Tokens that fit into pages that no request uses. Pages of known prefixes count as free.
    free_kv_tokens: int = 0
    # Tokens that fit into all pages.
    kv_tokens: int = 0
    # How many times a running request was swapped out.
    swaps: int = 0
    # Rounds so far.
    rounds: int = 0
    # Tokens of the prompts of admitted requests, and how many of these were found in the prefix cache, or had been read
    # for another sample of the same request.
    prompt_tokens: int = 0
    cached_tokens: int = 0
    # New tokens of all requests.
    completion_tokens: int = 0
    # Drafted tokens that were verified, and how many of these were accepted.
    drafted: int = 0
    accepted: int = 0
    # For i = 0..K-1: how many times drafted token i was accepted.
    accepted_per_position: list[int] = dataclasses.field(default_factory=list)
    # Speculative steps: one for each row and round that verified a drafted token.
    spec_steps: int = 0
    # How many requests ended, by finish reason.
    finished: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def acceptance_rate(self) -> float | None:
        """The number of accepted tokens over the number of verified ones. None if no token was verified."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + the mean number of accepted tokens of a speculative step. None if no step was speculative."""
        return 1 + self.accepted / self.spec_steps if self.spec_steps else None

    def count_step(self, tokens: int, drafted: int, accepted: int) -> None:
        """Counts one round of one request."""
        self.completion_tokens += tokens
        self.drafted += drafted
        self.accepted += accepted
        self.spec_steps += drafted > 0
        for position in range(accepted):
            self.accepted_per_position[position] += 1

    def count_end(self, ticket: Ticket) -> None:
        """Counts a request that has ended."""
        reason = "error" if ticket.completion.failed else str(ticket.completion.finish_reason)
        self.finished[reason] = self.finished.get(reason, 0) + 1
