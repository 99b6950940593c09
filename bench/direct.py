"""
Headwise without its batcher: each call goes straight to the engine, one after the other.

    python -m bench.direct
"""

import sys
import time
from collections.abc import Callable

from service import batcher
from service.__main__ import main
from service.calls import Answer, Call, Run, Stages


class Direct(batcher.Batcher):
    """A batcher that neither waits, joins nor counts."""

    async def submit(
        self,
        call: Call,
        *,
        on_run: Callable[[Run], None] | None = None,
    ) -> Answer:
        """Return the engine's own answer."""
        started = time.monotonic()
        outputs = self._engine.run(call.inputs, weights=call.weights)
        stages = Stages(0, 0, time.monotonic() - started)
        return Answer(outputs.output, outputs.attention_weights, None, None, stages)


if __name__ == "__main__":
    sys.modules["service.__main__"].Batcher = Direct  # type: ignore[attr-defined]
    sys.exit(main())
