"""
Recompute every figure of a raw file from what it counts: `python docs/recompute.py RAW`.

Needs nothing but Python, and shares no code with the load tester.  Prints, as JSON, a line of
figures a point, under the names of the CSV file; see "The raw file" in load-testing.md.
"""

import base64
import json
import sys
import zlib

SHARES = {"p50": 50, "p90": 90, "p95": 95, "p99": 99, "p99_9": 99.9, "max": 100}
STAGES = ("queue", "assembly", "compute", "encode")


def times(histogram: str, prefix: str) -> dict[str, float]:
    """Return the figures, in ms, of times in an HDR histogram of microseconds (V2, base64)."""
    data, at, index, rows = zlib.decompress(base64.b64decode(histogram)[8:])[40:], 0, 0, []
    while at < len(data):
        number = shift = 0
        while data[at] > 127:
            number, shift, at = number | (data[at] & 127) << shift, shift + 7, at + 1
        number, at = number | data[at] << shift, at + 1
        if number % 2:  # so many empty buckets
            index += number // 2 + 1
            continue
        octave = max(index // 1024 - 1, 0)
        rows.append(((index - 1024 * octave) << octave, 1 << octave, number // 2))
        index += 1
    count = sum(calls for *_, calls in rows)
    found = {"count": count}
    if count:
        found["mean"] = sum(calls * (low + width // 2) for low, width, calls in rows) / count / 1e3
    for name, share in SHARES.items():
        rank = max(1, int(share * count / 100 + 0.5))
        for low, width, calls in rows:
            rank -= calls
            if rank <= 0:
                found[name] = (low + width - 1) / 1e3
                break
    return {f"{prefix}{name}{'_ms' * (name != 'count')}": at for name, at in found.items()}


def figures(point: dict) -> dict[str, float]:
    """Return the figures of one point."""
    status, windows = point["statuses"], point["windows"]
    good = sum(n for code, n in status.items() if code[0] == "2")
    refused = sum(status.get(code, 0) for code in ("429", "503", "504"))
    offered = sum(status.values()) + sum(point["failures"].values())
    found = {"offered": offered, "good": good, "refused": refused}
    found["failed"] = offered - good - refused
    found["good_per_s"] = sum(w["answered"] for w in windows) / point["seconds"]
    found |= times(point["histogram"], "latency_") | times(point["sent_histogram"], "sent_")
    found |= times(point["lag_histogram"], "lag_")
    for name, stage in ((point["stages_ms"] or {}) | {"decode": point["decode_ms"]}).items():
        found |= times(stage["histogram"], f"{name}_") if stage else {}
    if point["stages_ms"] and good:
        stages = sum(found.get(f"{name}_mean_ms", 0) for name in STAGES)
        sent, total = found["sent_mean_ms"], found.get("total_mean_ms")
        known = {"other": (total or 0) - stages, "network": sent - max(total or 0, stages)}
        parts = known if total is not None else {"rest": sent - stages}
        if point["model"] == "open":
            parts["waiting"] = found["latency_mean_ms"] - sent
        found |= {f"{name}_mean_ms": max(0.0, part) for name, part in parts.items()}
    seen = [times(window["histogram"], "") for window in windows]
    found["windows"] = [
        {"rate": w["answered"] / w["seconds"], "count": t["count"], "p50": t.get("p50_ms")}
        for w, t in zip(windows, seen, strict=True)
    ]
    return found


if __name__ == "__main__":
    [path] = sys.argv[1:]
    with open(path) as file:
        json.dump({p["id"]: figures(p) for p in json.load(file)["points"]}, sys.stdout, indent=1)
