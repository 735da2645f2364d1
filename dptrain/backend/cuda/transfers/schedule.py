"""The launches of steps whose messages GPUs send: ops and messages in the order in which they are queued.

A message begins after the launches that complete it, and ops of the next stage wait for it. Gathers of variables' new
values that nothing in their step reads are *late* (ZeRO-1's are): if another step follows, they travel beside its
forward pass, of which each op waits only for the values that it reads. Otherwise they follow the last step.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dptrain.program.tensor import Tensor

Launch = Callable[..., None]


class Part(Protocol):
    """Launches of a stage, and the numbers of the messages that they complete."""

    @property
    def launches(self) -> Sequence[Any]:
        """In order."""

    @property
    def ready(self) -> Sequence[int]:
        """In order."""


@dataclass(frozen=True)
class LinkedSteps:
    """What is queued for the first step of a run, for each further one, and after the last."""

    first: list[Any]
    further: list[Any]
    end: list[Any]


def linked_steps(
    stages: Sequence[Sequence[Part]],
    messages: Sequence[Any],
    reads: Mapping[int, Collection[Tensor]],
    parts: Sequence[Collection[Tensor]],
    late: Mapping[int, Collection[Tensor]],
    launch_of: Callable[[Callable[[], None]], Any],
) -> LinkedSteps:
    """Return the launches of steps.

    Args:
        stages: of a step.
        messages: `LinkedMessage`s, by number.
        reads: tensors that a launch reads, by its `id`; launches that follow it up to the next one in `reads` are of
            the same kernel.
        parts: tensors that each message sends.
        late: the numbers of late gathers, in the order in which all ranks send them, and the tensors of the variables
            that they write.
        launch_of: makes a launch of a call.
    """
    order = list(_step(stages, late))
    waiting: dict[Any, list[int]] = {}
    for number, tensors in late.items():
        used = (key for key in order if not _used(key, reads, parts).isdisjoint(tensors))
        waiting.setdefault(_key(next(used, ("finish", number))), []).append(number)

    def launches(arrivals: Mapping[Any, list[int]]) -> Iterator[Any]:
        for key in order:
            for number in arrivals.get(_key(key), ()):
                yield launch_of(messages[number].arrive)
            if isinstance(key, tuple):
                yield launch_of(getattr(messages[key[1]], key[0]))
            else:
                yield key

    gathers = [launch_of(messages[number].gather) for number in late]
    arrivals = [launch_of(messages[number].arrive) for number in late]
    return LinkedSteps(list(launches({})), [*gathers, *launches(waiting)], [*gathers, *arrivals])


def _step(stages: Sequence[Sequence[Part]], late: Collection[int]) -> Iterator[Any]:
    """Yield launches, and ("begin", number) or ("finish", number) of messages."""
    for stage in stages:
        for part in stage:
            yield from part.launches
            yield from (("begin", number) for number in part.ready if number not in late)
        yield from (("finish", number) for part in stage for number in part.ready)


def _used(key: Any, reads: Mapping[int, Collection[Tensor]], parts: Sequence[Collection[Tensor]]) -> set[Tensor]:
    return set(parts[key[1]]) if isinstance(key, tuple) else set(reads.get(id(key), ()))


def _key(key: Any) -> Any:
    return key if isinstance(key, tuple) else id(key)
