"""How many samples in flight keep an engine busy: found out while it works, never a fixed number.

Two ideas of congestion control on networks, with a server's queue and KV cache as the network: a
step stays only if the delivered rate confirms it, else the old limit comes back and the next try
comes later (BBR: Cardwell et al., CACM 2017; doubling at first: slow start, Jacobson, SIGCOMM
1988); and a full cache cuts by a factor at once (multiplicative decrease: Chiu and Jain, 1989).

Rates are noisy, so the noise is measured too: while it is large, only large steps are tried, and
the rate must change by more than the noise, up to half of what the limit changed by. Nothing but
pressure lowers a limit: while nothing queues, one that is too high only makes answers slower, and
one that is too low wastes the engine.
"""

from __future__ import annotations

import msgspec

from evald.engines.server_size import MOST, START_LIMIT

#: a step is worth it when the rate gains this share of what the limit gains (or loses no more);
#: with noise more, up to the second.
MIN_GAIN, MAX_GAIN = 0.1, 0.5
#: noise of a comparison that the rate must exceed; how fast its average follows.
NOISE_MARGIN, NOISE_RATE = 1.5, 0.3
#: steps up: the first, and smaller ones after steps that were not worth it.
STEPS = (2.0, 1.5, 1.25)
#: the least step up that the KV cache must leave room for: a smaller one tells nothing.
LEAST_STEP = 1.1
#: largest step down when requests queue on the server.
QUEUE_STEP = 0.7
#: rounds without another step after one that was not worth it; doubles from the first to the last.
FIRST_HOLD, LAST_HOLD = 4, 64
#: a queue of this share of what runs only keeps the server supplied.
QUEUE_SHARE, LEAST_QUEUE = 0.1, 2
#: used share of the KV cache beyond which running requests may be thrown out and done again.
KV_HIGH, KV_STEP = 0.95, 0.85
#: a step up aims below that: answers go on growing.
KV_AIM = 0.9
#: looks in a row that make a pressure; looks without demand that end an experiment.
QUEUE_LOOKS, KV_LOOKS, SLACK_LOOKS = 3, 2, 3
#: measured looks that make a round; turns of the samples in flight that make a rate of answers.
ROUND_LOOKS, TURNS = 3, 3


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A server's own account of its work, over all its ranks."""

    running: int
    waiting: int
    #: used share of the KV cache, 0..1, of the fullest rank.
    token_usage: float
    #: requests thrown out of the KV cache lately.
    retracted: int = 0
    #: generated tokens/s; None when it does not say.
    tokens_per_s: float | None = None

    @property
    def queued(self) -> bool:
        """Whether more waits than keeps the server supplied."""
        return self.waiting > max(LEAST_QUEUE, QUEUE_SHARE * self.running)

    @property
    def pressed(self) -> bool:
        """Whether the KV cache is, or is about to be, too full."""
        return self.token_usage >= KV_HIGH or self.retracted > 0


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One look at an engine; what is counted was counted since the look before."""

    elapsed_s: float
    #: samples in flight now, and whether the limit has held others back.
    in_flight: int
    full: bool
    #: answers that have arrived, and their tokens.
    answers: int
    tokens: int
    #: None when the server does not tell.
    load: Load | None


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens/s of one round by two measures; None where one cannot tell."""

    #: of answers that arrived: needs some turns of the samples in flight.
    completed: float | None
    #: by the server's account: sooner, where answers are long.
    decoded: float | None

    def over(self, other: Rates | None) -> float | None:
        """Divide by another round's rates, on average of the measures that both have."""
        if other is None:
            return None
        pairs = (self.completed, other.completed), (self.decoded, other.decoded)
        gains = [new / old for new, old in pairs if new is not None and old]
        return sum(gains) / len(gains) if gains else None


class _Round:
    """Readings at one limit: the first ones pass while the work adapts, the next are measured."""

    def __init__(self) -> None:
        self._settled = False
        self._looks = self._answers = self._tokens = 0
        self._elapsed_s = 0.0
        self._decoded: list[float] = []

    def add(self, reading: Reading, limit: int) -> None:
        rate = reading.load.tokens_per_s if reading.load is not None else None
        self._answers += reading.answers
        if not self._settled:
            self._settled = rate is not None or self._answers >= limit
            self._answers = 0 if self._settled else self._answers
            return
        self._looks += 1
        self._tokens += reading.tokens
        self._elapsed_s += reading.elapsed_s
        self._decoded += [] if rate is None else [rate]

    def rates(self, limit: int) -> Rates | None:
        """Tell the rates once there are any."""
        if self._looks < ROUND_LOOKS:
            return None
        turned = self._answers >= TURNS * limit and self._elapsed_s > 0
        completed = self._tokens / self._elapsed_s if turned else None
        # a look at a moment without work has no rate
        told = 2 * len(self._decoded) >= self._looks
        decoded = sum(self._decoded) / len(self._decoded) if told else None
        if completed is None and decoded is None:
            return None
        return Rates(completed=completed, decoded=decoded)


class LimitSearch:
    """Decides the limit from one reading a second. Pure: no clock, no I/O."""

    def __init__(self, *, most: int | None = None, start: int = START_LIMIT) -> None:
        self._most = most or MOST
        #: the limit now; differs from ``_base`` while another one is tried.
        self.limit = min(start, self._most)
        self._base = self.limit
        self._base_rates: Rates | None = None
        self._round = _Round()
        #: index of the next step up.
        self._step = 0
        #: by how much, as a share, two rounds at one limit differ.
        self._noise = 0.0
        #: rounds to wait before the next step up and down.
        self._hold_up = self._hold_down = 0
        self._next_hold = FIRST_HOLD
        self._queue_looks = self._kv_looks = self._slack_looks = 0

    def begin(self, start: int, most: int) -> None:
        """Start over at what a server was started for, which is no guess: steps up come later."""
        self._most = most
        self._move(start)
        self._base, self._base_rates = self.limit, None
        self._step, self._noise, self._next_hold = 0, 0.0, FIRST_HOLD
        self._hold_up, self._hold_down = FIRST_HOLD, 0
        self._queue_looks = self._kv_looks = self._slack_looks = 0

    def look(self, reading: Reading) -> int:
        """Take in one reading; the limit from now on, 1..most."""
        load = reading.load
        self._queue_looks = self._queue_looks + 1 if load is not None and load.queued else 0
        self._kv_looks = self._kv_looks + 1 if load is not None and load.pressed else 0
        if reading.in_flight > self.limit:
            pass  # what was cut before has not had its effect yet
        elif self._kv_looks >= KV_LOOKS:
            self._cut()
        elif not reading.full:
            self._slacken()
        else:
            self._slack_looks = 0
            self._round.add(reading, self.limit)
            rates = self._round.rates(self.limit)
            if rates is not None:
                self._end_round(rates, load)
        return self.limit

    def forget(self) -> None:
        """Keep the limit that was found, but compare nothing with what was measured before."""
        self._move(self._base)
        self._base_rates = None
        self._queue_looks = self._kv_looks = self._slack_looks = 0

    def _slacken(self) -> None:
        """Too little to do: nothing can be learned about the limit."""
        self._round = _Round()
        self._slack_looks += 1
        if self._slack_looks == SLACK_LOOKS:
            self.forget()

    def _end_round(self, rates: Rates, load: Load | None) -> None:
        self._round = _Round()
        gain = rates.over(self._base_rates)
        if self.limit == self._base:
            if gain is not None:
                self._noise += NOISE_RATE * (min(abs(gain - 1), 1.0) - self._noise)
            self._hold_up, self._hold_down = max(self._hold_up - 1, 0), max(self._hold_down - 1, 0)
        elif gain is not None and self._worth_it(gain):
            self._keep()
        else:
            self._go_back()
            return
        self._base_rates = rates
        self._try_next(load)

    def _worth_it(self, gain: float) -> bool:
        """Up: the rate must rise with the limit; down: it must not fall with it."""
        change = self.limit / self._base - 1
        least, most = MIN_GAIN * abs(change), MAX_GAIN * abs(change)
        margin = min(max(NOISE_MARGIN * self._noise, least), most)
        return gain >= (1 + margin if change > 0 else 1 - margin)

    def _keep(self) -> None:
        self._next_hold = max(self._next_hold // 2, FIRST_HOLD)
        if self.limit > self._base:
            self._step = max(self._step - 1, 0)
        else:
            self._step, self._hold_up = len(STEPS) - 1, FIRST_HOLD
        self._base = self.limit

    def _go_back(self) -> None:
        """Undo what was not worth it, and wait longer before the next try."""
        if self.limit > self._base:
            self._step = min(self._step + 1, len(STEPS) - 1)
            self._hold_up = self._next_hold
        else:
            self._hold_down = self._next_hold
        self._next_hold = min(2 * self._next_hold, LAST_HOLD)
        self._move(self._base)

    def _try_next(self, load: Load | None) -> None:
        """Begin the next experiment, if there is a reason for one."""
        if load is not None and self._queue_looks >= QUEUE_LOOKS:
            if self._hold_down == 0:
                # what runs now is enough, and a few that keep it supplied
                enough = load.running + max(1.0, QUEUE_SHARE / 2 * load.running)
                wanted = max(enough, QUEUE_STEP * self._base)
                self._move(int(min(wanted, self._base - 1)))
        elif self._hold_up == 0 and not self._queue_looks:
            step, used = self._next_step(), 0.0 if load is None else load.token_usage
            if used * step > KV_AIM:
                step = KV_AIM / used
            if step >= LEAST_STEP:
                self._move(int(max(step * self._base, self._base + 1)))

    def _next_step(self) -> float:
        """Choose the step that is due, or the smallest larger one that noise does not hide."""
        visible = (
            s for s in STEPS[self._step :: -1] if MAX_GAIN * (s - 1) >= NOISE_MARGIN * self._noise
        )
        return next(visible, STEPS[0])

    def _cut(self) -> None:
        """Give way to a full KV cache without a verdict: what it throws out is done twice."""
        # a step up is undone, else the limit that has been good so far is too much by now
        self._move(self._base if self.limit > self._base else int(self.limit * KV_STEP))
        self._base, self._base_rates = self.limit, None
        self._step, self._hold_up, self._kv_looks = len(STEPS) - 1, FIRST_HOLD, 0

    def _move(self, limit: int) -> None:
        self.limit = max(1, min(limit, self._most))
        self._round = _Round()
