"""Pages and drawings: HTML, charts and the engine graph as SVG."""
