"""Engine reports: JSON of an engine in, one HTML page with CSV, JSON and SVG beside it out.

`write` makes the report of one engine or of every engine in a folder; `write_compare` puts engines side by side.
"""

from __future__ import annotations

from pathlib import Path

from cutefuse.errors import CutefuseError
from cutefuse.output import make_folder, write_json, write_text
from cutefuse.report.analyse import tables
from cutefuse.report.analyse.compare import Comparison, compare
from cutefuse.report.analyse.rank import peaks_of
from cutefuse.report.draw import svg
from cutefuse.report.draw.layout import layout
from cutefuse.report.draw.page import write_compare_page, write_engine_page
from cutefuse.report.read.graph import edges
from cutefuse.report.read.reader import Engine, find_engines, read_engine
from cutefuse.report.read.sources import one_engine


def write(source: Path, outdir: Path, onnx_path: Path | None = None, peaks: str = "auto", quiet: bool = False) -> Path:
    """Write `<name>.report.html`, `.layers.csv`, `.report.json` and `.graph.json.svg` for each engine of `source`.

    Args:
        source: folder of engine JSON files, or one graph JSON. outdir: folder of the report; made when missing.
        onnx_path: the model, for the ranking of what to fuse next.
        peaks: roof to compare with: auto, measured, a board's name or a JSON file (see `cutefuse roofline`).
    Returns the page of the first engine. Raises CutefuseError for files that are no engine.
    """
    pages = []
    make_folder(outdir)
    for files in find_engines(source):
        engine = read_engine(files)
        analysis = tables.analyse(engine, peaks_of(peaks, engine), onnx_path or _model_of(engine))
        pages.append(_write_one(analysis, outdir))
        if not quiet:
            print(tables.terminal(analysis))
    return pages[0]


def _model_of(engine: Engine) -> Path | None:
    """The ONNX model that the build recorded, when it is still there."""
    recorded = engine.build.get("Model")
    path = Path(str(recorded)) if recorded else None
    return path if path and path.suffix == ".onnx" and path.is_file() else None


def _write_one(analysis: tables.Analysis, outdir: Path) -> Path:
    engine = analysis.engine
    links = edges(engine)
    drawing = layout(len(engine.layers), links)
    stem = engine.files["graph"].name.removesuffix(".graph.json").removesuffix(".json")
    has_shapes = any(layer.outputs or layer.inputs for layer in engine.layers)
    page = outdir / f"{stem}.report.html"
    write_text(outdir / f"{stem}.graph.json.svg", svg.graph(engine, links, drawing, standalone=True))
    write_text(outdir / f"{stem}.layers.csv", tables.layers_csv(analysis))
    write_json(outdir / f"{stem}.report.json", tables.report_json(analysis))
    write_engine_page(analysis, page, svg.graph(engine, links, drawing, standalone=False) if has_shapes else "")
    return page


def write_compare(sources: list[Path], output: Path, quiet: bool = False) -> Comparison:
    """Compare engines (folders or graph JSON files, the baseline first) in one page, with CSV and JSON beside it.

    Raises CutefuseError for one engine, files that are no engine, and an `output` that cannot be a page.
    """
    if len(sources) < 2:
        raise CutefuseError("one engine was given; a comparison needs two or more folders or *.graph.json files")
    if output.suffix in (".csv", ".json"):
        raise CutefuseError(f"{output} is to be the page, beside which .csv and .json are written; name it *.html")
    engines = [read_engine(one_engine(source)) for source in sources]
    for engine, source in zip(engines, sources, strict=True):
        if not engine.profiled and any(e.profiled for e in engines):
            raise CutefuseError(f"{source} holds no layer times (*.profile.json), the others do; profile that one too")
        if sum(e.name == engine.name for e in engines) > 1:
            engine.name = f"{source.name if source.is_dir() else source.parent.name}/{engine.name}"
    comparison = compare(engines)
    make_folder(output.parent)
    write_text(output.with_suffix(".csv"), tables.compare_csv(comparison))
    write_json(output.with_suffix(".json"), tables.compare_json(comparison))
    write_compare_page(comparison, output)
    if not quiet:
        print(tables.compare_terminal(comparison))
    return comparison
