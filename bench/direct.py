"""
Headwise without its batcher: each call goes straight to the engine, one after the other.

    python -m bench.direct
"""

import asyncio
import sys
import time
from collections.abc import Callable

from service.__main__ import main
from service.inference import batcher
from service.inference.calls import Answer, Call, Run, Stages
from service.inference.queued_call import Deliver, QueuedCall


class Direct(batcher.Batcher):
    """A batcher without queue, batches or counters."""

    def enter(
        self,
        call: Call,
        deliver: Deliver,
        *,
        on_run: Callable[[Run], None] | None = None,
    ) -> QueuedCall:
        """Run the call at once, and deliver the engine's own answer in the loop's next turn."""
        started = time.monotonic()
        outputs = self._engine.run(call.inputs, weights=call.weights)
        stages = Stages(0, 0, time.monotonic() - started)
        answer = Answer(outputs.output, outputs.attention_weights, None, None, stages)
        asyncio.get_running_loop().call_soon(deliver, answer)
        return QueuedCall(call, deliver, 0, started, started, 0, on_run, is_over=True)


if __name__ == "__main__":
    sys.modules["service.app"].Batcher = Direct  # type: ignore[attr-defined]
    sys.exit(main())
