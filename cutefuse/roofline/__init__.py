"""Peak rates of devices, arithmetic intensity, and language models under the roof."""
