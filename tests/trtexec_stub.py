"""A stand-in for trtexec: the banner, help and logs of a given version, and plausible files for the options it gets.

Copied beside a test as an executable; the behaviour is chosen with environment variables:
STUB_VERSION (101600), STUB_FAIL (a log line and exit 1), STUB_SLEEP (seconds), STUB_PLUGINS (how many fused nodes
become plugin layers; all by default), STUB_NAMES_ONLY. STUB_COSTS names a JSON file, node name -> microseconds, with
"fused NAME" for a node of ours: then an engine has the nodes of its model as layers, and its times are theirs.
"""

STUB = r"""#!{python}
import json, os, re, sys, time
version = int(os.environ.get("STUB_VERSION", "101600"))
major = version // 10000
print(f"&&&& RUNNING TensorRT.trtexec [TensorRT v{{version}}] [b32] # trtexec")
options = ["--onnx", "--saveEngine", "--loadEngine", "--exportLayerInfo", "--exportProfile", "--exportTimes",
           "--timingCacheFile", "--profilingVerbosity", "--skipInference", "--verbose", "--dynamicPlugins", "--shapes",
           "--minShapes", "--optShapes", "--maxShapes", "--stronglyTyped", "--noDataTransfers", "--useCudaGraph",
           "--useSpinWait", "--separateProfileRun", "--builderOptimizationLevel", "--duration", "--noTF32"]
if major == 10:
    options += ["--fp16", "--bf16", "--int8", "--best"]
if "--help" in sys.argv:
    for option in options:
        print(f"  {{option}}=spec     text")
    sys.exit(0)
given = dict(a.partition("=")[::2] for a in sys.argv[1:])
for name in given:
    if name not in options:
        print(f"[11/21/2026-01:02:03] [E] Unknown option: {{name}}")
        print("&&&& FAILED TensorRT.trtexec"); sys.exit(1)
log = lambda text, level="I": print(f"[11/21/2026-01:02:03] [{{level}}] {{text}}", flush=True)
log("=== Model Options ==="); log("Format: ONNX"); log("Model: " + given.get("--onnx", "") + ":x"); log("")
log("=== Build Options ==="); log("Precision: FP32+FP16"); log("")
log("=== Device Information ==="); log("Selected Device: NVIDIA H200"); log("Compute Capability: 9.0")
log("SMs: 132"); log("Application Memory Clock Rate: 3.201 GHz")
log("Memory Bus Width: 6144 bits (ECC enabled)"); log("")
log("Eliminating concatenation cat_0", "V")
log("Generating copy for /up/conv_out because input is not movable.", "V")
if os.environ.get("STUB_FAIL"):
    if "--saveEngine" in given:
        open(given["--saveEngine"], "w").write("half an eng")
    log(os.environ["STUB_FAIL"], "E"); print("&&&& FAILED TensorRT.trtexec"); sys.exit(1)
if os.environ.get("STUB_SLEEP"):
    open(os.environ["STUB_PID"], "w").write(str(os.getpid()))
    if "--saveEngine" in given:
        open(given["--saveEngine"], "w").write("half an eng")
    time.sleep(float(os.environ["STUB_SLEEP"]))
names = ["conv_first", "fused_0", "fused_1", "act_last"]
costs, fused, text = None, [], "engine bytes"
if "STUB_COSTS" in os.environ:
    import random
    if "--onnx" in given:
        import onnx
        found = onnx.load(given["--onnx"], load_external_data=False).graph.node
        nodes = [(n.name, n.domain == "cutefuse") for n in found]
    else:
        nodes = json.load(open(given["--loadEngine"]))
    table = json.load(open(os.environ["STUB_COSTS"]))
    names, fused, text = [n for n, _ in nodes], [n for n, own in nodes if own], json.dumps(nodes)
    costs = [table.get(("fused " if own else "") + n, 10.0) / 1000 for n, own in nodes]
plugins = int(os.environ.get("STUB_PLUGINS", "2")) if "--dynamicPlugins" in given else 0
layers, last = [], "x"
for i, name in enumerate(names):
    plugin = name in fused if costs else name.startswith("fused") and int(name[-1]) < plugins
    layer = {{"Name": name if plugin or not name.startswith("fused") else name + "/inner_conv",
             "LayerType": "PluginV3" if plugin else "CaskConvolution",
             "Inputs": [{{"Name": last, "Dimensions": [1, 8, 4, 4], "Format/Datatype": "Row major linear FP32"}}],
             "Outputs": [{{"Name": f"t{{i}}", "Dimensions": [1, 8, 4, 4], "Format/Datatype": "Row major linear FP32"}}],
             "TacticValue": "0x0", "StreamId": 0, "Metadata": f"[ONNX Layer: {{name}}]"}}
    last = f"t{{i}}"
    layers.append(layer)
if os.environ.get("STUB_NAMES_ONLY"):
    layers = [layer["Name"] for layer in layers]
def write(option, text):
    if option in given:
        open(given[option], "w").write(text)
write("--saveEngine", text)
write("--timingCacheFile", "cache")
layer_text = json.dumps({{"Layers": layers, "Bindings": ["x", last]}})
write("--exportLayerInfo", layer_text.replace("[ONNX Layer", "\x1e[ONNX Layer"))
write("--exportProfile", json.dumps([{{"count": 100}}] + [
    {{"name": n, "timeMs": 10.0 * (i + 1), "averageMs": costs[i] if costs else 0.1 * (i + 1),
      "medianMs": costs[i] if costs else 0.1 * (i + 1), "percentage": 10.0 * (i + 1)}} for i, n in enumerate(names)]))
total = sum(costs) * random.uniform(0.995, 1.005) if costs else 1.0
write("--exportTimes", json.dumps([
    {{"computeMs": total * (1 + 0.01 * i), "latencyMs": total * (1 + 0.01 * i)}} for i in range(20)]))
if "--loadEngine" in given:
    log("=== Performance summary ===")
    log("Throughput: 900.5 qps")
    statistics = "min = 1 ms, max = 2 ms, mean = 1.1 ms, median = 1.05 ms"
    statistics += ", percentile(90%) = 1.5 ms, percentile(99%) = 1.9 ms"
    log("Latency: " + statistics)
    log("GPU Compute Time: " + statistics)
    log("Total Host Walltime: 3.0 s"); log("Total GPU Compute Time: 2.9 s")
    log("* Throughput may be bound by Enqueue Time rather than GPU Compute and the GPU may be under-utilized.", "W")
print("&&&& PASSED TensorRT.trtexec")
"""
