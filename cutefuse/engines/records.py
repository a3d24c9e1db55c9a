"""What trtexec's profile JSON files hold, from the times that an embedded engine took itself."""

from __future__ import annotations

import statistics
from typing import Any


def profile_records(layers: dict[str, list[float]]) -> list[dict[str, Any]]:
    """profile.json of trtexec from the times (ms) of each layer, in the order of execution."""
    total = sum(map(sum, layers.values())) or 1.0
    records: list[dict[str, Any]] = [{"count": max(map(len, layers.values()), default=0)}]
    for name, times in layers.items():
        records.append(
            {
                "name": name,
                "timeMs": sum(times),
                "averageMs": statistics.fmean(times),
                "medianMs": statistics.median(times),
                "percentage": 100 * sum(times) / total,
            }
        )
    return records


def summary(latencies_ms: list[float], wall_s: float, inference_options: dict[str, str]) -> dict[str, Any]:
    """profile.metadata.json from whole-inference latencies: min, max, mean, median, p90, p95, p99 as in trtexec."""
    ordered = sorted(latencies_ms)
    percentiles = [ordered[max(len(ordered) - int(len(ordered) * (100 - p) / 100) - 1, 0)] for p in (90, 95, 99)]
    values = [ordered[0], ordered[-1], statistics.fmean(ordered), statistics.median(ordered), *percentiles]
    return {
        "performance_summary": {
            "Throughput": len(ordered) / wall_s if wall_s else 0.0,
            "Latency": values,
            "GPU Compute Time": values,
            "Total Host Walltime": wall_s,
            "Total GPU Compute Time": sum(ordered) / 1000,
        },
        "percentiles": [90, 95, 99],
        "inference_options": inference_options,
        "device_information": {},
        "warnings": [],
    }
