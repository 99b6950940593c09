"""Which processor this is: what rounds a proof's last digits, beside the runtime's version."""

import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")

_INSTRUCTIONS = (
    *("sse4_2", "avx", "avx2", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512vl"),
    *("avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve", "sve2", "svebf16", "svei8mm", "sme"),
)
"""The sets for which the runtime has kernels of their own, as Linux names them."""


def processor(cpuinfo: Path = _CPUINFO) -> dict[str, str]:
    """Return the architecture, the processor's name, and which instruction sets it has."""
    facts = _first_core(cpuinfo)
    flags = facts.get("flags", facts.get("Features", "")).split()
    return {
        "machine": platform.machine(),
        "cpu": facts.get("model name") or platform.processor() or "unknown",
        "instructions": " ".join(name for name in _INSTRUCTIONS if name in flags),
    }


def _first_core(cpuinfo: Path) -> dict[str, str]:
    """Return what Linux says of the first core; nothing elsewhere."""
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}
