"""
Headwise without its batcher: each call goes to the engine's thread by itself.

    python -m bench.direct
"""

import asyncio
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from service import batcher
from service.__main__ import main
from service.calls import Answer, Call, Stages


class Direct(batcher.Batcher):
    """A batcher that neither waits, joins nor counts."""

    async def submit(self, call: Call) -> Answer:
        """Return the engine's own answer."""
        started = time.monotonic()
        outputs = await asyncio.get_running_loop().run_in_executor(
            _thread, lambda: self._engine.run(call.inputs, weights=call.weights)
        )
        stages = Stages(0, 0, time.monotonic() - started)
        return Answer(outputs.output, outputs.attention_weights, None, None, stages)


_thread = ThreadPoolExecutor(1)

if __name__ == "__main__":
    sys.modules["service.__main__"].Batcher = Direct  # type: ignore[attr-defined]
    sys.exit(main())
