// Index arithmetic of ConcatConv on the CPU: the walk over the reduction against a plain loop, and rows against taps.
#include <cstdio>
#include <cstdlib>
#include <tuple>
#include <vector>

#include "concat_conv/tiles.h"
#include "conv/problem.h"
#include "conv/sm90/k_tiles.h"
#include "expect.h"
#include "quant_concat_conv/tiles.h"

namespace cc = cutefuse::concat_conv;
namespace qc = cutefuse::quant_concat_conv;

namespace {

cc::Problem problem(std::vector<int> const &channels, int R, int S) {
  cc::Problem p{};
  p.sources = static_cast<int>(channels.size());
  for (int i = 0; i < p.sources; ++i) p.C[i] = channels[i];
  p.N = 2, p.H = 9, p.W = 7, p.K = 5, p.R = R, p.S = S;
  p.stride_h = 2, p.stride_w = 1, p.pad_top = 1, p.pad_left = 2, p.pad_bottom = 0, p.pad_right = 3;
  p.dilation_h = 1, p.dilation_w = 2;
  p.P = cc::output_size(p.H, R, p.stride_h, p.pad_top + p.pad_bottom, p.dilation_h);
  p.Q = cc::output_size(p.W, S, p.stride_w, p.pad_left + p.pad_right, p.dilation_w);
  return p;
}

// Every channel block of every source and tap is visited once, in the packed order.
void test_cursor(std::vector<int> const &channels, int R, int S) {
  cc::Problem const p = problem(channels, R, S);
  cc::KCursor cursor(p);
  std::int64_t column = 0;
  int tiles = 0;
  for (int source = 0; source < p.sources; ++source) {
    for (int block = 0; block < cc::blocks_of(p.C[source]); ++block) {
      for (int r = 0; r < R; ++r) {
        for (int s = 0; s < S; ++s, ++tiles, column += cc::kChannelBlock, cursor.advance(p)) {
          expect(cursor.source == source && cursor.r == r && cursor.s == s, "cursor visits source, r, s in order", r,
                 s);
          expect(cursor.channel() == block * cc::kChannelBlock, "cursor visits channels in order", cursor.channel());
          expect(cursor.column == column, "cursor finds the packed column");
        }
      }
    }
  }
  expect(cursor.source == p.sources, "cursor ends behind the last source");
  expect(tiles == cc::k_tiles<cc::kChannelBlock>(p), "k_tiles counts the walk", tiles);
  expect(column == cc::packed_columns(p), "packed_columns counts the blocks");
}

// The walk by channel blocks, taps inside, meets every column of the packed filter that holds channels exactly once.
template <int kTileK>
void test_blocks(std::vector<int> const &channels, int R, int S) {
  cc::Problem const p = problem(channels, R, S);
  std::vector<int> visits(cc::packed_columns(p), 0), expected(visits);
  cc::KCursor cursor(p);
  for (int i = cc::k_tiles<cc::kChannelBlock>(p); i > 0; --i, cursor.advance(p)) {
    for (int part = 0; part < cc::kChannelBlock && cursor.channel() + part < p.C[cursor.source]; part += kTileK) {
      ++expected[cursor.column + part];
    }
  }
  std::int64_t column = 0;
  int tiles = 0;
  for (cc::KBlock<kTileK> block(p); block.source < p.sources; column += block.filter_step(R * S), block.advance(p)) {
    for (int tap = 0; tap < R * S; ++tap, ++tiles, column += cc::kChannelBlock) {
      expect(block.left > 0, "block holds channels");
      expect(column >= 0 && column < cc::packed_columns(p), "block stays inside the packed filter");
      ++visits[column];
    }
  }
  expect(visits == expected, "blocks visit the columns of the cursor");
  expect(tiles == cc::k_tiles<kTileK>(p), "blocks and taps are the k-tiles", tiles);
}

void test_divider() {
  for (int d : {1, 2, 3, 5, 7, 64, 100, 513, 65535, 65536, 1 << 20, 16777213, 0x7ffffffe, 0x7fffffff}) {
    cutefuse::Divider const divider(d);
    for (std::int64_t q = 0; q <= 40; ++q) {
      for (std::int64_t n : {q * d - 1, q * d, q * d + 1, 0x7fffffff - q}) {
        if (n < 0 || n > 0x7fffffff) continue;
        expect(divider.divide(static_cast<int>(n)) == n / d, "divider divides", static_cast<int>(n), d);
      }
    }
  }
}

void test_pixels() {
  cc::Problem const p = problem({8}, 3, 2);
  cutefuse::Divider const by_image(p.P * p.Q), by_row(p.Q);
  int m = 0;
  for (int n = 0; n < p.N; ++n) {
    for (int row = 0; row < p.P; ++row) {
      for (int q = 0; q < p.Q; ++q, ++m) {
        cc::Pixel const at = cc::pixel_of(p, by_image, by_row, m);
        expect(at.n == n && at.h0 == row * 2 - 1 && at.w0 == q - 2, "pixel_of inverts the row index", m);
      }
    }
  }
}

void test_source_coordinate() {
  for (int factor = 1; factor <= cc::kMaxUpsample; ++factor) {
    std::uint32_t const multiplier = cc::upsample_multiplier(factor);
    for (int at = 0; at < 1 << 15; ++at) {
      expect(cc::source_coordinate(at, multiplier) == at / factor, "source_coordinate divides", at, factor);
    }
  }
}

void test_output_size() {
  for (int input = 1; input < 12; ++input) {
    for (int filter = 1; filter < 5; ++filter) {
      for (int stride = 1; stride < 4; ++stride) {
        for (int pad = 0; pad < 4; ++pad) {
          for (int dilation = 1; dilation < 3; ++dilation) {
            int count = 0;  // positions at which the dilated filter lies inside the padded input
            for (int at = 0; at + dilation * (filter - 1) < input + pad; at += stride) ++count;
            expect(cc::output_size(input, filter, stride, pad, dilation) == count, "output_size counts positions",
                   input, filter);
          }
        }
      }
    }
  }
}

// shared_kib: the most shared memory that a block may have on the GPUs that the Ampere tiles are for.
template <class Table, class Sm90Table>
void test_table(Table const &tiles, Sm90Table const &sm90_tiles, int shared_kib) {
  for (cc::Tile const &a : tiles) {
    bool const unique = cutefuse::find_id(tiles, a.id) == &a && cutefuse::find_id(sm90_tiles, a.id) == nullptr;
    expect(a.id > 0 && unique, "tile ids are positive and unique", a.id);
    expect(a.threads() <= 1024 && a.shared_bytes() <= shared_kib * 1024, "a tile fits a block", a.id);
  }
  for (cc::Sm90Tile const &a : sm90_tiles) {
    expect(a.id > 0 && cutefuse::find_id(sm90_tiles, a.id) == &a, "Hopper's tile ids are positive and unique", a.id);
    cc::Sm90Tile const multiplied = cc::as_multiplied(a);
    bool const whole = multiplied.rows() % 64 == 0 && multiplied.width() % 8 == 0;
    expect(whole && multiplied.pixels() * multiplied.filters == a.pixels() * a.filters,
           "a Hopper tile is of whole wgmma", a.id);
  }
}

void test_tiles() {
  test_table(cc::kTiles, cc::kSm90Tiles, 163);
  test_table(qc::kTiles, qc::kSm90Tiles, 227);  // the largest int8 tile runs on data-centre GPUs alone
  expect(cutefuse::find_id(cc::kTiles, 0) == nullptr && cutefuse::find_id(cc::kTiles, -1) == nullptr,
         "0 and negative ids name no tile");
}

// [N][H][W][ld] and [N][ceil(C/32)][H][W][32], counted in the order of memory.
void test_int8_layouts() {
  for (int C : {1, 16, 20, 33, 64, 100}) {
    int const N = 2, pixels = 6, ld = (C + 15) / 16 * 16, blocks = (C + 31) / 32;
    qc::Strides const last = qc::strides_of(cutefuse::Layout::kChannelsLast, ld, C, pixels);
    qc::Strides const block = qc::strides_of(cutefuse::Layout::kBlocks32, ld, C, pixels);
    auto const at = [](qc::Strides const &to, int n, int pixel, int c) {
      return n * to.image + pixel * to.pixel + c / qc::kLayoutBlock * to.block + c % qc::kLayoutBlock;
    };
    for (int n = 0; n < N; ++n) {
      for (int pixel = 0; pixel < pixels; ++pixel) {
        for (int c = 0; c < C; ++c) {
          expect(at(last, n, pixel, c) == (n * pixels + pixel) * ld + c, "kHWC16 elements", C, c);
          int const expected = ((n * blocks + c / 32) * pixels + pixel) * 32 + c % 32;
          expect(at(block, n, pixel, c) == expected, "kCHW32 elements", C, c);
        }
      }
    }
  }
  qc::Problem p{};
  for (auto const &[type, layout, K, stored] : std::vector<std::tuple<cutefuse::Type, cutefuse::Layout, int, int>>{
           {cutefuse::Type::kFloat32, cutefuse::Layout::kChannelsLast, 19, 19},
           {cutefuse::Type::kFloat16, cutefuse::Layout::kBlocks32, 19, 24},
           {cutefuse::Type::kInt8, cutefuse::Layout::kChannelsLast, 33, 48},
           {cutefuse::Type::kInt8, cutefuse::Layout::kBlocks32, 33, 64}}) {
    p.output_type = type, p.layout = layout, p.K = K;
    expect(qc::stored_channels(p) == stored, "output channels in memory", K, qc::stored_channels(p));
  }
}

// However many blocks of a small tile share a multiprocessor, they fit and their rings hide the latency of the loads.
void test_small_ring(cc::Sm90Tile const &tile, int channels, bool pre_activated) {
  cc::Problem p{};
  p.sources = 1, p.C[0] = channels, p.upsample[0] = 1, p.pre_activated = pre_activated;
  p.N = 1, p.H = p.W = p.P = p.Q = 16, p.K = 64, p.R = p.S = 3;
  p.stride_h = p.stride_w = p.dilation_h = p.dilation_w = p.pad_top = p.pad_left = 1;
  cc::HaloPlan const plan = cc::plan_of(tile, p);
  for (int i = 0; i < 2 * cc::small_blocks(tile); ++i) {
    int const blocks = i / 2 + 1;
    bool const divided = i % 2 != 0;
    int const stages = cc::small_stages(tile, plan, p, divided, blocks);
    int const bytes = cc::small_shared_bytes(tile, plan, p, divided, stages);
    expect(bytes <= 227 * 1024 && blocks * (bytes + 1024) <= 228 * 1024, "small blocks fit", tile.id, blocks);
    expect(stages <= cc::kSmallStages, "a small ring has a barrier for each stage", tile.id, stages);
    bool const wide = tile.pixel_rows && !pre_activated;  // their sums stay whole where parts leave no ring
    expect(blocks > 1 || stages >= cc::small_least_stages(tile) || (wide && divided), "a small block alone has a ring",
           tile.id, stages);
    expect(stages == cc::kSmallStages ||
               blocks * (cc::small_shared_bytes(tile, plan, p, divided, stages + 1) + 1024) > 228 * 1024,
           "a small ring is as long as can be", tile.id, stages);
  }
}

template <int kCount>
void test_small_rings(cc::Sm90Tile const (&tiles)[kCount]) {
  for (cc::Sm90Tile const &tile : tiles) {
    if (tile.schedule != cc::Sm90Schedule::kSmall) continue;
    if (tile.plain) test_small_ring(tile, 64, false);
    if (tile.halo) test_small_ring(tile, 128, false);  // two patches
    for (int channels = 64; tile.pre_activates && channels <= cc::kMaxActivated; channels *= 2) {
      test_small_ring(cc::form_of(tile, true), channels, true);
    }
  }
}

// Small 8-bit tiles join two taps of the last sources that have one block, or two such sources; of the others a last
// block may be alone.
void test_joined() {
  struct Case {
    std::vector<int> channels;
    int taps_each_way, joined_from, k_tiles, lone_block;
  };
  cc::Sm90Tile const &small = *cutefuse::find_id(qc::kSm90Tiles, 232), &large = *cutefuse::find_id(qc::kSm90Tiles, 246);
  for (Case const &c : std::vector<Case>{{{64}, 3, 0, 5, -1},
                                         {{64}, 1, 1, 1, -1},
                                         {{64}, 2, 0, 2, -1},
                                         {{65}, 3, 1, 9, -1},
                                         {{64, 128}, 3, 2, 18, -1},
                                         {{128, 40, 64}, 3, 1, 19, -1},
                                         {{40, 320}, 3, 2, 36, 5},
                                         {{320}, 1, 1, 3, -1},
                                         {{64, 8}, 1, 0, 1, -1},
                                         {{64, 8, 40}, 1, 0, 2, -1},
                                         {{192, 40, 64}, 1, 1, 3, -1},
                                         {{40, 128, 64}, 1, 3, 3, -1}}) {
    cc::Problem const p = problem(c.channels, c.taps_each_way, c.taps_each_way);
    int const first = c.channels.front();
    expect(cc::joined_from(small, p) == c.joined_from, "the last sources of one block are joined", first, p.R);
    expect(cc::k_tiles(small, p) == c.k_tiles, "a joined k-tile is two taps or sources", first, p.R);
    expect(cc::lone_block(small, p) == c.lone_block, "a last block without a second is known", first, p.R);
    expect(cc::joined_from(large, p) == p.sources, "large tiles join nothing", first, p.R);
  }
  expect(cc::lone_block(large, problem({128, 64}, 3, 3)) == 2, "large tiles know a last block without a second");
}

// The last block of an odd number becomes a source of its own where taps are joined.
void test_divided() {
  struct Case {
    std::vector<int> channels;
    int taps_each_way;
    std::vector<int> divided;
    int k_tiles;
  };
  cc::Sm90Tile const &small = *cutefuse::find_id(qc::kSm90Tiles, 232), &large = *cutefuse::find_id(qc::kSm90Tiles, 246);
  for (Case const &c : std::vector<Case>{
           {{288}, 3, {256, 32}, 23},
           {{40, 320}, 3, {40, 256, 64}, 32},
           {{320, 40}, 3, {256, 64, 40}, 28},
           {{192, 192}, 3, {192, 128, 64}, 32},
           {{192, 128}, 3, {192, 128}, 27},
           {{64}, 3, {64}, 5},
           {{192}, 1, {192}, 2},
           {{8, 8, 8, 8, 8, 8, 8, 192}, 3, {8, 8, 8, 8, 8, 8, 8, 192}, 81},
       }) {
    cc::Problem p = problem(c.channels, c.taps_each_way, c.taps_each_way);
    for (int i = 0; i < p.sources; ++i) p.start[i] = 16 * i, p.ldx[i] = 1000 + i, p.scale[i] = 1.f + float(i);
    cc::Problem const q = cc::divided_problem(small, p);
    bool const divided = c.divided.size() > c.channels.size();
    int const source = cc::divided_source(small, p), first = c.channels.front();
    expect((source >= 0) == divided && q.sources == int(c.divided.size()), "one source is divided", first, p.R);
    for (int i = 0; i < q.sources; ++i) {
      int const of = divided && i > source ? i - 1 : i, skipped = divided && i == source + 1 ? q.C[source] : 0;
      expect(q.C[i] == c.divided[std::size_t(i)], "a divided source's channels", first, i);
      expect(q.start[i] == p.start[of] + skipped, "a divided source goes on where its first part ends", first, i);
      expect(q.ldx[i] == p.ldx[of] && q.scale[i] == p.scale[of], "both parts are of one tensor", first, i);
    }
    expect(cc::k_tiles(small, q) == c.k_tiles, "k-tiles of a divided source", first, p.R);
    expect(cc::packed_columns(q) == cc::packed_columns(p), "packed filters stay as they are", first, p.R);
    expect(cc::divided_problem(large, p).sources == p.sources, "large tiles divide nothing", first, p.R);
  }
}

}  // namespace

int main() {
  for (auto const &channels : std::vector<std::vector<int>>{{64}, {1}, {65, 64}, {8, 80, 256}, {33, 31, 1, 128}}) {
    for (int R : {1, 3}) {
      for (int S : {1, 2, 5}) {
        test_cursor(channels, R, S);
        test_blocks<64>(channels, R, S);
        test_blocks<32>(channels, R, S);
        test_blocks<16>(channels, R, S);
      }
    }
  }
  test_divider();
  test_pixels();
  test_source_coordinate();
  test_output_size();
  test_tiles();
  test_int8_layouts();
  test_small_rings(cc::kSm90Tiles);
  test_small_rings(qc::kSm90Tiles);
  test_joined();
  test_divided();
  std::printf("test_problem: %s\n", failures == 0 ? "passed" : "FAILED");
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
