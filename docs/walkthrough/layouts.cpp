// Prints the layouts of one tile of the Ampere kernel, from the kernel's own headers, on the host: no GPU, no nvcc.
// `layouts` prints what docs/walkthrough.md quotes, `layouts --json` what draw.py draws. It exits with 1 where a layout
// does not do what the page says of it.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>
#include <set>
#include <vector>

#include "concat_conv/tiles.h"
#include "conv/sm80/pixels.cuh"

using namespace cute;
namespace conv = cutefuse::conv;

struct TileRow {
  static constexpr conv::Tile kTile = cutefuse::concat_conv::kTiles[1];
};
using Traits = conv::Sm80<cutlass::half_t, TileRow>;
constexpr int kM = Traits::kM, kN = Traits::kN, kK = Traits::kK, kStages = Traits::kStages, kThreads = Traits::kThreads;
static_assert(TileRow::kTile.id == 4, "the page speaks of this tile");

int faults = 0;
void expect(bool right, char const *what) {
  if (!right) std::printf("WRONG: %s\n", what), ++faults;
}

template <class Layout>
void show(char const *name, Layout const &layout) {
  std::printf("%-10s ", name);
  print(layout);
  std::printf("\n");
}

// Concat of 64 and 64 channels, Conv 3x3 to 64 channels, one image of 32x32, padded to keep its size.
conv::Params problem() {
  conv::Params params{};
  conv::Problem &p = params.problem;
  p.sources = 2, p.outputs = 1, p.N = 1, p.H = p.P = 32, p.W = p.Q = 32, p.K = 64, p.R = p.S = 3;
  p.stride_h = p.stride_w = p.dilation_h = p.dilation_w = 1;
  p.pad_top = p.pad_left = p.pad_bottom = p.pad_right = 1;
  for (int i = 0; i < 2; ++i) p.C[i] = 64, p.upsample[i] = 1, p.ldx[i] = 64;
  params.set_steps();
  return params;
}

// How often the bank that is asked most is asked, by lanes that read or write `bytes` each at these byte offsets.
int ways(std::vector<int> const &offsets, int bytes) {
  int most = 0, asked[32] = {};
  for (int at : offsets)
    for (int b = at / 4; b < (at + bytes) / 4; ++b) most = std::max(most, ++asked[b % 32]);
  return most;
}

int plain(int row, int column) { return row * kK + column; }

void global_layouts(conv::Params const &params) {
  conv::Problem const &p = params.problem;
  std::printf("## problem\n");
  show("source",
       make_layout(make_shape(p.N, p.H, p.W, p.C[0]), make_stride(p.H * p.W * p.C[0], p.W * p.C[0], p.C[0], 1)));
  // Under one tap, row m = (q, p, n) of the GEMM is a pixel, and its column a channel.
  auto const x = make_layout(make_shape(make_shape(p.Q, p.P, p.N), p.C[0]),
                             make_stride(make_stride(p.C[0], p.W * p.C[0], p.H * p.W * p.C[0]), 1));
  show("X, a tap", x);
  int const columns = int(conv::packed_columns(p));
  auto const w = make_layout(make_shape(p.K, make_shape(64, p.S, p.R, 1, p.sources)),
                             make_stride(columns, make_stride(1, 64, 64 * p.S, 64 * p.S * p.R, columns / 2)));
  show("W, packed", w);
  show("Y", make_layout(make_shape(p.N * p.P * p.Q, p.K), make_stride(p.K, 1)));
  std::printf("GEMM       M %d, N %d, k-tiles %d\n", p.N * p.P * p.Q, p.K, conv::k_tiles<kK>(p));

  std::printf("## local_tile\n");
  Tensor gX =
      local_tile(make_tensor(static_cast<cutlass::half_t *>(nullptr), x), Shape<Int<kM>, Int<kK>>{}, make_coord(1, _));
  show("gX, m = 1", gX.layout());
  std::printf("first      element %d of the source: output row %d\n", int(gX.data() - (cutlass::half_t *)nullptr), 4);
  expect(gX.data() - (cutlass::half_t *)nullptr == 4 * p.W * p.C[0], "tile 1 starts at the fifth row of the image");
  Tensor gW =
      local_tile(make_tensor(static_cast<cutlass::half_t *>(nullptr), w), Shape<Int<kN>, Int<kK>>{}, make_coord(0, _));
  show("gW, n = 0", gW.layout());
}

void reduction(conv::Params const &params) {
  std::printf("## reduction\n");
  conv::KCursor at(params.problem);
  for (int tile = 0; tile < conv::k_tiles<kK>(params.problem); ++tile, at.advance(params.problem)) {
    if (tile < 4 || (tile > 7 && tile < 10))
      std::printf("k-tile %-2d  source %d, channels from %d, tap (%d,%d), filter columns from %d\n", tile, at.source,
                  at.channel(), at.r, at.s, int(at.column));
  }
}

void shared_layouts() {
  std::printf("## shared memory\n");
  show("atom", Traits::SwizzleAtom<kK>{});
  show("sX", Traits::SmemX{});
  show("sW", Traits::SmemW{});
  show("sY", Traits::SmemY{});
  std::printf("bytes      %d of stages, %d of the epilogue\n", TileRow::kTile.stages_bytes(), kM * kN * 2);
  std::printf("chunk at   ");
  for (int row = 0; row < 8; ++row) {
    for (int chunk = 0; chunk < 8; ++chunk) std::printf("%d", Traits::SmemX{}(row, 8 * chunk, 0) % kK / 8);
    std::printf(row < 7 ? " " : "\n");
  }
}

void copies() {
  std::printf("## copy, global to shared\n");
  typename Traits::G2S g2s;
  Tensor coordinates = make_identity_tensor(Shape<Int<kM>, Int<kK>>{});
  std::printf("threads    %d in %d rows of %d, 16 bytes each; %d pixels and %d filters a thread\n", kThreads,
              Traits::kRowsPerPass, Traits::kChunks, Traits::kRowsX, Traits::kRowsW);
  show("thread 9", g2s.get_slice(9).partition_D(make_tensor((cutlass::half_t *)nullptr, Traits::SmemX{})).layout());
  Tensor own = g2s.get_slice(9).partition_D(coordinates);
  std::printf("pixels     ");
  for (int i = 0; i < Traits::kRowsX; ++i)
    std::printf("(%d,%d) ", int(get<0>(own(0, i, 0))), int(get<1>(own(0, i, 0))));
  std::printf("\n");
  std::set<int> copied;
  for (int t = 0; t < kThreads; ++t) {
    Tensor part = g2s.get_slice(t).partition_D(coordinates);
    for (int i = 0; i < size(part); ++i) copied.insert(get<0>(part(i)) * kK + get<1>(part(i)));
  }
  expect(int(copied.size()) == kM * kK && Traits::kRowsX * 8 * kThreads == kM * kK, "each element is copied once");
}

void predicates(conv::Params const &all) {
  std::printf("## predicates\n");
  conv::Params params = all;
  conv::Problem const &p = params.problem;
  params.by_image = cutefuse::Divider(p.P * p.Q), params.by_row = cutefuse::Divider(p.Q);
  for (int m : {0, 33, 1023, 1024}) {
    conv::SourceRows<Traits> const rows(params, m);
    int read = 0;
    for (int r = 0; r < p.R; ++r)
      for (int s = 0; s < p.S; ++s) read += (rows.outside[0] & (1u << r | 1u << (16 + s))) == 0;
    std::printf("row %-6d pixel under tap (0,0) %5d, outside %08x, taps read %d\n", m, rows.pixel[0], rows.outside[0],
                read);
    expect(read == (m == 33 ? 9 : m == 1024 ? 0 : 4), "a corner has four taps inside, the middle nine");
  }
}

void tensor_cores() {
  std::printf("## mma\n");
  typename Traits::Mma mma;
  print(mma);
  show("rX", make_layout(shape(partition_shape_A(mma, Shape<Int<kM>, Int<kK>>{}))));
  show("rW", make_layout(shape(partition_shape_B(mma, Shape<Int<kN>, Int<kK>>{}))));
  show("acc", make_layout(shape(partition_shape_C(mma, Shape<Int<kM>, Int<kN>>{}))));
  std::printf("steps      %d of %d channels a k-tile\n", Traits::kSteps, Traits::kMmaK);
  std::set<int> owned;
  for (int t = 0; t < kThreads; ++t) {
    Tensor part = mma.get_slice(t).partition_C(make_identity_tensor(Shape<Int<kM>, Int<kN>>{}));
    for (int i = 0; i < size(part); ++i) owned.insert(get<0>(part(i)) * kN + get<1>(part(i)));
    if (t == 5) {
      std::printf("thread 5   ");
      for (int i = 0; i < 4; ++i) std::printf("(%d,%d) ", int(get<0>(part(i))), int(get<1>(part(i))));
      std::printf("of the first 16x8\n");
    }
  }
  expect(int(owned.size()) == kM * kN, "each output has one thread");

  std::printf("## copy, shared to registers\n");
  auto const s2r = make_tiled_copy_A(typename Traits::S2R{}, mma);
  show("thread 0", s2r.get_slice(0).partition_S(make_tensor((cutlass::half_t *)nullptr, Traits::SmemX{})).layout());
  std::vector<int> swizzled, straight;
  for (int lane = 0; lane < 8; ++lane) {  // the rows of the first of ldmatrix's four matrices
    Tensor from = s2r.get_slice(lane).partition_S(make_identity_tensor(Shape<Int<kM>, Int<kK>>{}));
    int const row = get<0>(from(0, 0, 0)), column = get<1>(from(0, 0, 0));
    swizzled.push_back(2 * Traits::SmemX{}(row, column, 0)), straight.push_back(2 * plain(row, column));
  }
  std::printf("ldmatrix   asks a bank %d time(s) with the swizzle, %d without\n", ways(swizzled, 16),
              ways(straight, 16));
  expect(ways(swizzled, 16) == 1 && ways(straight, 16) == 8, "the swizzle removes the conflicts of ldmatrix");
}

// (k-tile, stage that is read, stage that is filled meanwhile, the k-tile that goes there), as conv_sm80 turns them.
std::vector<std::vector<int>> pipeline(int tiles) {
  std::vector<std::vector<int>> turns;
  int read_stage = 0, write_stage = kStages - 1;
  for (int tile = 0; tile < tiles; ++tile) {
    turns.push_back({tile, read_stage, write_stage, tile + kStages - 1});
    write_stage = read_stage;
    read_stage = read_stage == kStages - 1 ? 0 : read_stage + 1;
  }
  return turns;
}

void stages() {
  std::printf("## pipeline\n");
  for (auto const &t : pipeline(4))
    std::printf("k-tile %d   reads stage %d, while k-tile %d is copied into stage %d; at its end wait<%d>\n", t[0],
                t[1], t[3], t[2], kStages - 2);
  for (auto const &t : pipeline(30))
    expect(t[3] % kStages == t[2] && t[0] % kStages == t[1], "a stage is read as filled");
}

// Byte offsets in shared memory, and where in the output tile, of the first store of warp 0: pairs from registers.
struct Store {
  int m, n, offset;
};
std::vector<Store> pairs() {
  std::vector<Store> found;
  for (int lane = 0; lane < 32; ++lane) {
    Tensor part = typename Traits::Mma{}.get_slice(lane).partition_C(make_identity_tensor(Shape<Int<kM>, Int<kN>>{}));
    int const m = get<0>(part(0)), n = get<1>(part(0));
    found.push_back({m, n, 2 * Traits::SmemY{}(m, n)});
  }
  return found;
}

// The first 16-byte stores of warp 0 to global memory.
std::vector<Store> vectors() {
  std::vector<Store> found;
  for (int lane = 0; lane < 32; ++lane) {
    int const m = lane / Traits::kChunksY, n = lane % Traits::kChunksY * Traits::kVector;
    found.push_back({m, n, 2 * Traits::SmemY{}(m, n)});
  }
  return found;
}

// 32-byte sectors of an output of 64 channels that these stores touch.
int sectors(std::vector<Store> const &stores) {
  std::set<int> touched;
  for (Store const &s : stores) touched.insert((s.m * kN + s.n) * 2 / 32);
  return int(touched.size());
}

void epilogue() {
  std::printf("## epilogue\n");
  std::vector<int> swizzled, straight, out;
  for (Store const &s : pairs()) swizzled.push_back(s.offset), straight.push_back(2 * (s.m * kN + s.n));
  for (Store const &s : vectors()) out.push_back(s.offset);
  std::printf("r2s        4 bytes a lane: a bank is asked %d time(s) with the swizzle, %d without\n", ways(swizzled, 4),
              ways(straight, 4));
  std::printf("s2g        16 bytes a lane, %d rows a pass, %d passes\n", Traits::kRowsY, kM / Traits::kRowsY);
  std::printf("sectors    a warp's store from registers: %d bytes in %d sectors; through shared memory: %d in %d\n",
              32 * 4, sectors(pairs()), 32 * 16, sectors(vectors()));
  expect(ways(swizzled, 4) == 1 && ways(straight, 4) == 8, "the swizzle removes the conflicts of the epilogue");
  for (int phase = 0; phase < 4; ++phase)
    expect(ways({out.begin() + 8 * phase, out.begin() + 8 * phase + 8}, 16) == 1, "reads of 16 bytes have no conflict");
}

void json() {
  std::printf("{\"swizzle\": [");
  for (int row = 0; row < 8; ++row)
    for (int chunk = 0; chunk < 8; ++chunk)
      std::printf("%s%d", row + chunk ? ", " : "", Traits::SmemX{}(row, 8 * chunk, 0) % kK / 8);
  std::printf("], \"owners\": [");
  std::vector<int> owner(32 * 32);
  for (int t = 0; t < kThreads; ++t) {
    Tensor part = typename Traits::Mma{}.get_slice(t).partition_C(make_identity_tensor(Shape<_32, _32>{}));
    for (int i = 0; i < size(part); ++i) owner[get<0>(part(i)) * 32 + get<1>(part(i))] = t;
  }
  for (int i = 0; i < 32 * 32; ++i) std::printf("%s%d", i ? ", " : "", owner[i]);
  std::printf("], \"pipeline\": [");
  for (auto const &t : pipeline(7)) std::printf("%s[%d, %d, %d, %d]", t[0] ? ", " : "", t[0], t[1], t[2], t[3]);
  std::printf("], \"pairs\": [");
  auto const list = [](std::vector<Store> const &stores) {
    for (std::size_t i = 0; i < stores.size(); ++i) std::printf("%s[%d, %d]", i ? ", " : "", stores[i].m, stores[i].n);
  };
  list(pairs());
  std::printf("], \"vectors\": [");
  list(vectors());
  std::printf("], \"stages\": %d}\n", kStages);
}

int main(int count, char **words) {
  if (count == 2 && std::strcmp(words[1], "--json") == 0) return json(), 0;
  if (count != 1) return std::fprintf(stderr, "usage: layouts [--json]\n"), 2;
  conv::Params const params = problem();
  std::printf("tile       %s, %d threads\n", TileRow::kTile.name, kThreads);
  global_layouts(params), reduction(params), shared_layouts(), copies(), predicates(params), tensor_cores(), stages();
  epilogue();
  return faults != 0;
}
