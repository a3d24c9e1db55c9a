#!/usr/bin/env python3
"""Draw docs/images/gain.svg: a network's measured time before and after as two bars, from the README's table."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "gain.svg"
NETWORK = "yolov8s"
LEFT, WIDTH, BAR = 150, 560, 40  # of the bars, in the picture's units

STYLE = """  <style>
    .page { fill: #ffffff; } .before { fill: #c9ced6; } .after { fill: #3c8545; } .gone { fill: none; stroke: #3c8545; stroke-dasharray: 4 4; }
    text { fill: #222222; } .name { text-anchor: end; } .title { font-weight: 600; font-size: 15px; } .note { fill: #555555; font-size: 12.5px; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #16181c; } text { fill: #e8e8e8; } .note { fill: #aaaaaa; } .before { fill: #555b66; } .after { fill: #57a862; } .gone { stroke: #57a862; }
    }
  </style>"""  # noqa: E501


def times_us(readme: str, network: str) -> tuple[float, float]:
    """What a network takes before and after, from the table of networks. Raises ValueError where it has no row."""
    found = re.search(rf"^\|{re.escape(network)}\|(\d+)\|(\d+)\|", readme, re.M)
    if not found:
        raise ValueError(f"the README's table has no row '{network}'")
    return float(found[1]), float(found[2])


def drawn(network: str, before_us: float, after_us: float) -> str:
    """The picture: two bars with the same scale, and what is saved."""
    after = WIDTH * after_us / before_us
    saved = f"{before_us - after_us:.0f} µs, {1 - after_us / before_us:.0%}"
    label = f"{network}: {before_us:.0f} microseconds before, {after_us:.0f} after"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 190" font-family="system-ui, sans-serif" font-size="14" role="img"
  aria-label="{label}">
{STYLE}
  <rect class="page" width="800" height="190" rx="8"/>
  <text class="title" x="20" y="30">{network}, one image, float16: one inference on an H200</text>
  <text class="name" x="{LEFT - 14}" y="{75}">plain</text>
  <rect class="before" x="{LEFT}" y="50" width="{WIDTH}" height="{BAR}" rx="3"/>
  <text x="{LEFT + WIDTH + 10}" y="75">{before_us:.0f} µs</text>
  <text class="name" x="{LEFT - 14}" y="{125}">with cutefuse</text>
  <rect class="after" x="{LEFT}" y="100" width="{after:.1f}" height="{BAR}" rx="3"/>
  <rect class="gone" x="{LEFT + after:.1f}" y="100" width="{WIDTH - after:.1f}" height="{BAR}" rx="3"/>
  <text x="{LEFT + after + 12:.1f}" y="125">{after_us:.0f} µs; {saved} saved</text>
  <text class="note" x="20" y="170">Measured in PyTorch's CUDA graphs (cuDNN, torch.compile), the faster of both each time. TensorRT was not run.</text>
</svg>
"""  # noqa: E501


def main() -> int:
    PICTURE.write_text(drawn(NETWORK, *times_us((ROOT / "README.md").read_text(encoding="utf-8"), NETWORK)))
    print(PICTURE.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
