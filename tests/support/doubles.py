"""Stand-ins that pass through the real interfaces."""

from collections.abc import Callable
from dataclasses import dataclass, field

from service.calls import Inputs, Outputs
from service.contract import LayerConfig
from service.engine import Engine, Provider, Stop


def _as_asked(inputs: Inputs) -> Inputs:
    return inputs


def _as_answered(inputs: Inputs, outputs: Outputs) -> Outputs:
    return outputs


@dataclass
class FaultyEngine:
    """
    A real engine with a fault planted before it, after it or both.

    `ask` changes what the engine is asked, `answer` what it answers; `inputs`
    there is what the caller gave, and `outputs.attention_weights` is None where
    no weights were asked for.
    """

    engine: Engine
    ask: Callable[[Inputs], Inputs] = _as_asked
    answer: Callable[[Inputs, Outputs], Outputs] = _as_answered
    layer: LayerConfig = field(init=False)
    provider: Provider = field(init=False)
    concurrent_runs: int = 1

    def __post_init__(self) -> None:
        self.layer = self.engine.layer
        self.provider = self.engine.provider

    def run(
        self, inputs: Inputs, *, weights: bool, stop: Stop | None = None, concurrent: bool = False
    ) -> Outputs:
        """See `Engine.run`."""
        return self.answer(inputs, self.engine.run(self.ask(inputs), weights=weights, stop=stop))
