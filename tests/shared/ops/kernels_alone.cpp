// The kernels' table of one instruction set, without torch: every format of weights in every height of tile, with and
// without rounded inputs, and attention over keys of every type.
//
// Prints a line "case, hash of the result" each. Ends with 1 if a result is far from a sum in double precision or a row
// depends on its company, and with 2 if this machine does not have the set.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "include/half_simd.h"
#include "include/kernels.h"
#include "pack.h"

using namespace neap;
namespace simd = neap::NEAP_ISA;
typedef std::vector<float> Floats;

static int bad = 0;

static uint32_t draw() {
  static uint64_t state = 88172645463325252ull;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return (uint32_t)(state >> 11);
}

static float number() { return (float)(draw() & 0xffff) / 32768.f - 1.f; }

static void say(const char* what, const char* name, int64_t detail, const Floats& result, bool good) {
  uint64_t hash = 1469598103934665603ull;
  for (float value : result) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    hash = (hash ^ bits) * 1099511628211ull;
  }
  std::printf("%s %s %lld, %016llx%s\n", what, name, (long long)detail, (unsigned long long)hash, good ? "" : " BAD");
  bad += !good;
}

// `count` numbers of a type, and what they are as float32.
template <class E>
static std::vector<uint8_t> stored(int64_t count, Floats* as_floats) {
  std::vector<uint8_t> bytes((size_t)count * sizeof(E));
  as_floats->resize((size_t)count);
  for (int64_t i = 0; i < count; ++i) {
    E* at = reinterpret_cast<E*>(bytes.data()) + i;
    simd::round_to(number(), at);
    (*as_floats)[(size_t)i] = simd::to_float(*at);
  }
  return bytes;
}

// Random blocks of GGUF with small scales. Those of the first 16 outputs have the quants of the largest magnitude.
static std::vector<uint8_t> blocks(Format format, int64_t count, int64_t first) {
  const Layout& layout = kLayouts[format];
  std::vector<uint8_t> bytes((size_t)(count * layout.source_bytes));
  for (int64_t i = 0; i < count; ++i) {
    uint8_t* block = &bytes[(size_t)(i * layout.source_bytes)];
    for (int64_t b = 0; b < layout.source_bytes; ++b)
      block[b] = i >= first ? (uint8_t)draw() : layout.bits == 8 ? 0x80 : format == kMxfp4 ? 0x77 : 0xff;
    Half scales[2];
    simd::round_to(.01f + .005f * number(), &scales[0]);
    simd::round_to(.02f * number(), &scales[1]);
    const bool has_minimum = format == kQ4_1 || format == kQ5_1 || format == kQ4_K || format == kQ5_K;
    if (format == kMxfp4) block[0] = (uint8_t)(118 + draw() % 6);
    else std::memcpy(block + (format == kQ6_K ? 208 : 0), scales, has_minimum ? 4 : 2);
  }
  return bytes;
}

// A row of inputs as the kernels round it.
static void round_inputs(Format format, float* x, int64_t count) {
  if (format == kPlainBf16)
    for (int64_t i = 0; i < count; ++i) {
      Bfloat rounded;
      simd::round_to(x[i], &rounded);
      x[i] = simd::to_float(rounded);
    }
  else
    for (float* group = x; group < x + count; group += 32) {
      float most = 0;
      for (int i = 0; i < 32; ++i) most = std::fmax(most, std::fabs(group[i]));
      for (int i = 0; i < 32; ++i) group[i] = (float)std::nearbyint(group[i] * (127.f / most)) * (most / 127.f);
    }
}

static void products(const Kernels& kernels, Format format, int64_t ins, bool rounds) {
  const int64_t outs = 41, panels = num_panels(outs), bytes = panel_bytes(format, ins), most = 14;
  std::vector<uint8_t> memory((size_t)(panels * bytes) + 64);
  uint8_t* packed = memory.data() + (64 - (uintptr_t)memory.data() % 64);
  const Layout& layout = kLayouts[format];
  Floats unused;
  const std::vector<uint8_t> source =
      format == kPlain32     ? stored<float>(outs * ins, &unused)
      : format == kPlain16   ? stored<Half>(outs * ins, &unused)
      : format == kPlainBf16 ? stored<Bfloat>(outs * ins, &unused)
                             : blocks(format, outs * ins / layout.source_inputs, kPanel * ins / layout.source_inputs);
  for (int64_t p = 0; p < panels; ++p)
    if (is_quantised(format)) pack_blocks(format, source.data(), outs, ins, p, packed + p * bytes);
    else pack_panel(format, source.data(), outs, ins, ins, 1, p, packed + p * bytes);
  Floats weight((size_t)(panels * ins * kPanel));
  for (int64_t p = 0; p < panels; ++p)
    for (int64_t k = 0; k < ins; k += kDepthBlock)
      kernels.dequantise(format, packed + p * bytes + block_begin(format, k / kDepthBlock),
                         ins - k < kDepthBlock ? ins - k : kDepthBlock, &weight[(size_t)((p * ins + k) * kPanel)]);
  if (!rounds) say("weights", layout.name, ins, weight, true);

  Floats x((size_t)(most * ins)), alone;
  for (size_t i = 0; i < x.size(); ++i) x[i] = i < (size_t)ins ? -3.f : 3.f * number();
  LinearArgs args{};
  args.weight = {packed, format, bytes, rounds};
  args.up = args.weight;
  args.in_features = args.x_stride = ins;
  args.out_features = outs;
  const auto run = [&](int64_t first, int64_t rows, bool gated) {
    Floats out((size_t)(rows * outs));
    args.x = x.data() + first * ins;
    args.rows = rows;
    args.out = out.data();
    args.gated = gated;
    args.activation = gated ? kSilu : kIdentity;
    const int64_t items = kernels.linear_items(args, 1);
    kernels.linear(args, items, 0, items);
    return out;
  };
  for (int64_t row = 0; row < most; ++row) {
    const Floats out = run(row, 1, false);
    alone.insert(alone.end(), out.begin(), out.end());
  }
  Floats rounded = x;
  bool good = true;
  for (int64_t row = 0; row < most; ++row) {
    if (rounds) round_inputs(format, &rounded[(size_t)(row * ins)], ins);
    for (int64_t o = 0; o < outs; ++o) {
      double sum = 0, size = 0;
      for (int64_t k = 0; k < ins; ++k) {
        const double product = (double)rounded[(size_t)(row * ins + k)] *
                               (double)weight[(size_t)((o / kPanel * ins + k) * kPanel + o % kPanel)];
        sum += product;
        size += std::fabs(product);
      }
      good = good && std::fabs(sum - (double)alone[(size_t)(row * outs + o)]) <= 1e-5 * size + 1e-6;
    }
  }
  say(rounds ? "rounded" : "product", layout.name, ins, alone, good);
  for (int64_t rows = 2; rows <= most; ++rows)
    if (const Floats out = run(0, rows, false); std::memcmp(out.data(), alone.data(), out.size() * sizeof(float)) != 0)
      say("rows in company", layout.name, rows, out, false);
  say(rounds ? "rounded gate" : "gate", layout.name, ins, run(0, 5, true), true);
}

template <class E>
static void attention(const Kernels& kernels, Dtype dtype, const char* name) {
  constexpr int64_t kHeads = 4, kKvHeads = 2, kQueries = 5, kKeys = 301, kWidth = 36;
  Floats q, k_floats, v_floats, out((size_t)(kQueries * kHeads * kWidth));
  stored<float>(kHeads * kQueries * kWidth, &q);
  const std::vector<uint8_t> k = stored<E>(kKvHeads * kKeys * kWidth, &k_floats),
                             v = stored<E>(kKvHeads * kKeys * kWidth, &v_floats);
  AttentionArgs args{};
  args.q = q.data();
  args.k = k.data();
  args.v = v.data();
  args.kv_dtype = dtype;
  args.out = out.data();
  args.batch = 1;
  args.heads = kHeads;
  args.kv_heads = kKvHeads;
  args.queries = kQueries;
  args.keys = kKeys;
  args.width = args.value_width = kWidth;
  args.q_head = kQueries * kWidth;
  args.q_row = args.k_row = args.v_row = kWidth;
  args.q_column = 1;
  args.k_head = args.v_head = kKeys * kWidth;
  args.causal = true;
  args.scaling = .3f;
  Floats scratch((size_t)kernels.attention_scratch(args) + 16);
  kernels.attention(args, scratch.data(), 0, kKvHeads);
  bool good = true;
  for (int64_t head = 0; head < kHeads; ++head)
    for (int64_t query = 0; query < kQueries; ++query) {
      const int64_t seen = kKeys - kQueries + query + 1, first = head / 2 * kKeys;
      std::vector<double> share((size_t)seen);
      double total = 0;
      for (int64_t key = 0; key < seen; ++key) {
        double score = 0;
        for (int64_t d = 0; d < kWidth; ++d)
          score += (double)q[(size_t)((head * kQueries + query) * kWidth + d)] *
                   (double)k_floats[(size_t)((first + key) * kWidth + d)];
        total += share[(size_t)key] = std::exp(.3 * score);
      }
      for (int64_t d = 0; d < kWidth; ++d) {
        double sum = 0;
        for (int64_t key = 0; key < seen; ++key)
          sum += share[(size_t)key] * (double)v_floats[(size_t)((first + key) * kWidth + d)];
        good = good && std::fabs(sum / total - (double)out[(size_t)((query * kHeads + head) * kWidth + d)]) < 1e-5;
      }
    }
  say("attention", name, kKeys, out, good);
}

int main(int count, char** arguments) {
  if (!select_kernels(count > 1 ? arguments[1] : "auto")) return 2;
  std::printf("%s\n", kernels().name);
  for (int format = 0; format < kFormats; ++format)
    for (bool rounds : {false, true})
      if (!rounds || can_round_inputs((Format)format))
        for (int64_t ins : {int64_t(512), int64_t(263)})
          if (ins == 512 || !is_quantised((Format)format)) products(kernels(), (Format)format, ins, rounds);
  attention<float>(kernels(), kFloat32, "F32");
  attention<Half>(kernels(), kFloat16, "F16");
  attention<Bfloat>(kernels(), kBfloat16, "BF16");
  return bad != 0;
}
