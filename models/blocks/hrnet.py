"""HRNet's backbone: four resolutions in parallel, each stage's modules add every branch to every other."""

from __future__ import annotations

from models.blocks.resnet import basic, bottleneck
from models.net import Net

MODULES = {2: 1, 3: 4, 4: 3}  # stage, which has as many branches, -> modules
BLOCKS = 4  # in each branch of a module


def backbone(net: Net, image: str, width: int, rows: int, columns: int) -> list[str]:
    """Features of width, 2, 4 and 8 * width channels at 1/4 to 1/32 of an image of rows x columns."""
    x = image
    for i in (1, 2):
        x = net.act(net.conv(x, 64, 3, f"conv{i}", stride=2), "Relu", f"act{i}")
    for i in range(4):
        x = bottleneck(net, x, 64, f"layer1/layer1.{i}", project=i == 0)
    xs = [_transition(net, x, width, "transition1.0/transition1.0", 1),
          _transition(net, x, 2 * width, "transition1.1/transition1.1.0/transition1.1.0", 2)]  # fmt: skip
    for stage, modules in MODULES.items():
        if stage > 2:
            scope = f"transition{stage - 1}.{stage - 1}"
            xs.append(_transition(net, xs[-1], width << (stage - 1), f"{scope}/{scope}.0/{scope}.0", 2))
        for module in range(modules):
            xs = _module(net, xs, width, f"stage{stage}/stage{stage}.{module}", rows, columns)
    return xs


def _transition(net: Net, x: str, filters: int, name: str, stride: int) -> str:
    return net.act(net.conv(x, filters, 3, f"{name}.0", stride=stride), "Relu", f"{name}.2")


def _module(net: Net, xs: list[str], width: int, name: str, rows: int, columns: int) -> list[str]:
    for branch in range(len(xs)):
        for block in range(BLOCKS):
            scope = f"{name}/branches.{branch}/branches.{branch}.{block}"
            xs[branch] = basic(net, xs[branch], width << branch, scope)
    fused, adds = [], 0
    for i in range(len(xs)):
        y = ""
        for j, x in enumerate(xs):
            z = x if i == j else _fuse(net, x, width, i, j, f"{name}/fuse_layers.{i}.{j}", rows, columns)
            if y:
                z = net.add("Add", [y, z], f"/{name}/Add{f'_{adds}' if adds else ''}")
                adds += 1
            y = z
        fused.append(net.act(y, "Relu", f"{name}/fuse_act{f'_{i}' if i else ''}"))
    return fused


def _fuse(net: Net, x: str, width: int, i: int, j: int, name: str, rows: int, columns: int) -> str:
    """Bring branch j to the resolution and the channels of branch i."""
    scope = name.rsplit("/", 1)[-1]
    if j > i:
        x = net.conv(x, width << i, 1, f"{name}/{scope}.0")
        return net.resize(x, rows >> (i + 2), columns >> (i + 2), f"{name}/{scope}.2")
    for k in range(i - j):
        last = k == i - j - 1
        x = net.conv(x, width << (i if last else j), 3, f"{name}/{scope}.{k}/{scope}.{k}.0", stride=2)
        x = x if last else net.act(x, "Relu", f"{name}/{scope}.{k}/{scope}.{k}.2")
    return x
