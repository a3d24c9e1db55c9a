"""The recorded times that constants were fitted to, the scripts that fit them again, and the report on both.

`make calibrate` prints the report: what each of these rows tells of which constants.

| constants | rows in data/ | refitted by |
|---|---|---|
| `times.POINTWISE`, `times.SPATIAL` | sites_h200, network_sites_h200 | convolutions.py |
| `rules_torch.ODD` | odd_channels_h200 | odd_channels.py |
| `times._KERNEL_US`, `_PASS_SHARE`; `rules_torch._JOIN_US` to `_SCATTER_US` | networks_h200 | networks.py |
| the others of `times` and `rules_torch` | traces that were not kept | by hand; networks.py tells errors |
| `cutlass_kernels/conv/depthwise.cpp` | depthwise_h200 | depthwise.py |
| `rows_clocks` of `cutlass_kernels/conv/sm90/cost.cpp` | patch_rows_h200 | patch_rows.py |
| `patch_us` of `cutlass_kernels/conv/sm90/cost.cpp` | patch_layers_h200 | small_patches.py |
| `four_clocks` of `cutlass_kernels/conv/sm90/cost.cpp` | short_layers_h200 | four.py |
| `times._DEPTHWISE_START_US` to `_DILATED_TAP_US` | depthwise_cudnn_h200 | by hand; depthwise.py tells errors |
| `cutlass_kernels/conv/sm90/cost.cpp`, `conv/cost.cpp`, the tables of mma.sync tiles | tiles_*, random_layers_h200, early_layers_h200, short_layers_h200, patch_layers_h200, near_h200 | by hand; tiles.py tells errors |
"""  # noqa: E501
