"""A plugin host: drives any V3 plugin library the way TensorRT's builder and runtime do, without TensorRT."""

from cutefuse_host.host import RUNTIME, Field, Host, HostError, Input, Plugin, Raw, field_of, reference_ops

__all__ = ["RUNTIME", "Field", "Host", "HostError", "Input", "Plugin", "Raw", "field_of", "reference_ops"]
