// The row norms of ONNX models. No CUDA header.
#include "row_norm/tiles.h"

namespace cutefuse::row_norm {

extern Op const op;

namespace {

constexpr AttrSpec kAttrSpecs[] = {{"epsilon", AttrKind::kFloats, 1, 1, 1, 1e-5}, kTileAttr};

constexpr Facts norm(bool layer, Residual residual) {
  return {Kind::kNorm, 0, Activation::kNone, residual, false, false, false, layer};
}
constexpr Variant kVariantTable[] = {
    {"CuteRMSNorm", 2, 1, norm(false, Residual::kNone)},
    {"CuteAddRMSNorm", 3, 2, norm(false, Residual::kBefore)},
    {"CuteLayerNorm", 3, 1, norm(true, Residual::kNone)},
    {"CuteAddLayerNorm", 4, 2, norm(true, Residual::kBefore)},
};
constexpr Form kForms[] = {{{kX, kGamma, kY}},
                           {{kX, kResidual, kGamma, kY, kSum}},
                           {{kX, kGamma, kBeta, kY}},
                           {{kX, kResidual, kGamma, kBeta, kY, kSum}}};
constexpr Family kFamily = {op, kForms, false};

}  // namespace

Op const op = op_of<kFamily>("row_norm", kVariantTable, kAttrSpecs, kConfigTable, kRetired);

}  // namespace cutefuse::row_norm
