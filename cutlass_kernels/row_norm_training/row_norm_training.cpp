// RMSNorm and LayerNorm as training needs them: forward that saves its statistics, and backward. Absent operands are
// vectors without elements, so two op_types serve every combination. No plugin registers them: the PyTorch operators
// are their only user. The kernels are those of row_norm.
#include "row_norm/tiles.h"

namespace cutefuse::row_norm_training {

extern Op const op;

namespace {

using namespace row_norm;

constexpr AttrSpec kAttrSpecs[] = {{"epsilon", AttrKind::kFloats, 1, 1, 1, 1e-5},
                                   {"layer", AttrKind::kInts, 1, 1, 0, 0.0}};  // 1: LayerNorm, 0: RMSNorm

constexpr Variant kVariantTable[] = {{"CuteRowNormForward", 4, 4, {Kind::kNorm}},
                                     {"CuteRowNormBackward", 6, 3, {Kind::kNormBackward}}};
constexpr Form kForms[] = {{{kX, kResidual, kGamma, kBeta, kY, kSum, kMean, kRstd}},
                           {{kDy, kDsum, kX, kGamma, kMean, kRstd, kDx, kDgamma, kDbeta}}};
constexpr Family kFamily = {op, kForms, true};

}  // namespace

Op const op = op_of<kFamily>("row_norm_training", kVariantTable, kAttrSpecs, kConfigTable, kRetired);

}  // namespace cutefuse::row_norm_training
