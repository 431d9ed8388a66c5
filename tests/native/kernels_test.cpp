// Kernels and packing against sums in double: every format, sizes that fill no tile, one token and
// many. For what pytest cannot load: the portable kernels under sanitizers, the ARM ones under an
// emulator.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>
#include <vector>

#include "kernels/api.h"
#include "runtime/pack.h"

#ifndef KERNELS
#define KERNELS kernels_scalar
#endif

using namespace octavo;

namespace {

std::mt19937 rng(1);

// Activations of `tokens` rows in every form, in exact allocations; digits of rows, or of groups with
// scales of their own.
struct Input {
  int k;
  size_t rows;
  struct alignas(64) Line { int8_t digits[64]; };  // kernels load and store whole ones
  std::vector<Line> q;
  std::vector<float> scale, sum, f32;
  std::vector<int32_t> start_high, start_low, pair_high, pair_low;
  std::vector<int32_t> neg32, neg16, neg16_high, neg_high, neg_low;
  std::vector<uint16_t> line;
  std::vector<int8_t> second_digits;
  std::vector<uint16_t> bf16;
  int second_lines;
  Input(int tokens, int k, std::optional<int> second)
      : k(k),
        rows(size_t(tokens + ROW_TILE - 1) / ROW_TILE * ROW_TILE),
        second_lines(second.value_or(0)) {
    const bool scaled = second.has_value();
    const size_t n = rows * size_t(k);
    q.resize(2 * n / 64), scale.resize(scaled ? n / 32 : rows), sum.resize(n / 32),
        neg16.resize(n / 16), f32.resize(n), bf16.resize(rows * bf16_stride(act()));
    if (scaled) neg16_high.resize(n / 16), line.resize(n / 16), second_digits.resize(n / 4);
    for (auto* x : {&neg32, &neg_high, &neg_low, &start_high, &start_low}) x->resize(n / 32);
    for (auto* x : {&pair_high, &pair_low}) x->resize(n / 64);
  }
  Act act() {
    return {k, q.data()->digits, scale.data(), start_high.data(), start_low.data(),
        pair_high.data(), pair_low.data(), neg_high.data(), neg_low.data(), sum.data(), neg32.data(),
        neg16.data(), neg16_high.data(), line.empty() ? nullptr : line.data(),
        second_digits.data(), second_lines, bf16.data(), true, f32.data(), false, false};
  }
};

uint8_t* aligned(std::vector<uint8_t>& storage, size_t bytes) {
  storage.assign(bytes + 64, 0);
  return storage.data() + (64 - reinterpret_cast<uintptr_t>(storage.data()) % 64) % 64;
}

void check(Storage type, const char* name, size_t n, size_t k, int tokens,
    std::optional<int> second) {
  const bool scaled = second.has_value();
  std::vector<uint8_t> source(stored_bytes(type, n, k));
  // ordinary numbers wherever a float lies
  for (uint8_t& b : source) b = uint8_t(0x30 | (rng() & 15));
  // which these have behind codes and scales of any bits
  const size_t any = type.type == GGML_Q2_K ? 80 : type.type == GGML_Q3_K ? 108 :
      type.type == GGML_Q6_K ? 208 : 0;
  for (size_t i = 0; i < source.size() && any; i++)
    if (i % (any + (type.type == GGML_Q2_K ? 4 : 2)) < any) source[i] = uint8_t(rng());
  if (is_grouped(panel_format(type.type))) for (size_t i = 0; i < n * k; i++) source[i] &= 15;
  const Format format = panel_format(type.type);
  const size_t bytes = panel_bytes(format, type.group, k), panels = (n + PANEL - 1) / PANEL;
  const int padded = int(padded_cols(k));
  std::vector<uint8_t> storage;
  uint8_t* packed = aligned(storage, panels * bytes);
  for (size_t p = 0; p < panels; p++) pack_panel(type, source.data(), n, k, p, packed + p * bytes);

  const Kernels* kernels = KERNELS();
  Input input(tokens, padded, second);
  const Act act = input.act();
  std::vector<float> line(static_cast<size_t>(padded));
  std::normal_distribution<float> normal;
  for (int t = 0; t < tokens; t++) {
    for (size_t i = 0; i < k; i++) line[i] = normal(rng) * (i / GROUP % 3 ? 1 : 9);
    kernels->emit(act, t, line.data());
  }
  std::vector<float> out(static_cast<size_t>(tokens) * panels * PANEL), row(k);
  kernels->linear[format]({packed, bytes, padded, act, tokens, out.data(), int(panels * PANEL),
                              nullptr, nullptr, type.group},
      0, int(panels));
  for (size_t r = 0; r < n; r++) {
    unpack_row(format, type.group, packed + r / PANEL * bytes, int(r % PANEL), k, row.data());
    for (int t = 0; t < tokens; t++) {
      double sum = 0, size = 0, inputs = 0, largest = 0, weights = 0;
      for (size_t i = 0; i < k; i++) {
        const int g = int(i) / GROUP;
        double x;
        if (format >= BF16) {
          x = input.f32[size_t(t * padded) + i];
        } else {
          const int8_t* q = input.q.data()->digits + digits(t, g, padded / GROUP) + i % GROUP;
          const size_t at = scaled ? tiled(t, g, padded / GROUP) : size_t(t);
          x = double(input.scale[at]) * (q[0] * (1 << DIGIT) + q[DIGITS]);
        }
        sum += x * double(row[i]);
        size += std::fabs(x * double(row[i]));
        inputs += std::fabs(x), largest = std::max(largest, std::fabs(double(row[i]))),
                                weights += std::fabs(double(row[i]));
      }
      // Each group or feature is rounded a few times in fp32, inputs of bf16 weights maybe to 16
      // bits; a zero point or minimum adds terms as large as its sums. In fixed point a weight is off by five units (runtime/units.h).
      const double unit = 3 * largest / 32000 + weights / (1 << 24);
      const double bound = (64 + 4.0 * double(k)) * size * 0x1p-24 +
          (is_fixed(format) && !scaled ? unit * (5 * inputs + 1) : 0) + 1e-6;
      const double got = double(out[size_t(t) * panels * PANEL + r]);
      if (!(std::fabs(got - sum) <= bound)) {
        fprintf(
            stderr, "%s %zux%zu, token %d, row %zu: %g, expected %g\n", name, n, k, t, r, got, sum);
        exit(1);
      }
    }
  }
}

void check_attention(KvType type, int head_dim, int keys, int rows) {
  const Kernels* kernels = KERNELS();
  const int padded = (head_dim + 15) / 16 * 16, blocks = (keys + BLOCK - 1) / BLOCK;
  const size_t each = size_t(2 * BLOCK * padded) * (type == KV_F32 ? 4 : type == KV_BF16 ? 2 : 1) +
                      (type == KV_INT8 ? size_t(2 * BLOCK * kv_groups(padded)) * 2 : 0);
  std::vector<uint8_t> storage;
  uint8_t* pool = aligned(storage, each * size_t(blocks));
  std::normal_distribution<float> normal;
  std::vector<float> k(static_cast<size_t>(keys * padded)), v(k), x(static_cast<size_t>(padded)),
      q(static_cast<size_t>(rows * padded));
  auto draw = [&] { for (int i = 0; i < head_dim; i++) x[size_t(i)] = normal(rng); };
  std::vector<int32_t> table;
  for (int b = 0; b < blocks; b++) table.push_back(blocks - 1 - b);
  for (int t = 0; t < keys; t++) {
    uint8_t* block = pool + size_t(table[size_t(t / BLOCK)]) * each;
    draw(), memcpy(&k[size_t(t * padded)], x.data(), size_t(padded) * 4),
        kernels->store_k(x.data(), head_dim, padded, t % BLOCK, type, block);
    draw(), memcpy(&v[size_t(t * padded)], x.data(), size_t(padded) * 4),
        kernels->store_v(x.data(), head_dim, padded, t % BLOCK, type, block);
  }
  std::vector<std::vector<uint8_t>> queries(
      static_cast<size_t>(rows), std::vector<uint8_t>(size_t(padded) * 4));
  std::vector<float> max(static_cast<size_t>(rows)), sum(max),
      out(static_cast<size_t>(rows * padded));
  AttendArgs a{};
  for (int r = 0; r < rows; r++) {
    draw(), memcpy(&q[size_t(r * padded)], x.data(), size_t(padded) * 4);
    kernels->store_q(x.data(), head_dim, padded, 1, type, queries[size_t(r)].data());
    a.q[r] = queries[size_t(r)].data(), a.last[r] = keys - 1 - r % keys,
    a.first[r] = r % 2 ? a.last[r] / 2 : 0, a.max[r] = &max[size_t(r)], a.sum[r] = &sum[size_t(r)],
    a.out[r] = &out[size_t(r * padded)];
  }
  a.rows = rows, a.head_dim = padded, a.block_stride = each, a.keys = {pool, table.data(), 0, keys};
  kernels->attend[type](a);
  for (int r = 0; r < rows; r++) {
    std::vector<double> scores, value(size_t(head_dim), 0);
    double top = -1e30, total = 0;
    for (int t = a.first[r]; t <= a.last[r]; t++) {
      double s = 0;
      for (int i = 0; i < head_dim; i++)
        s += double(q[size_t(r * padded + i)]) * double(k[size_t(t * padded + i)]);
      scores.push_back(s), top = std::max(top, s);
    }
    for (size_t t = 0; t < scores.size(); t++) {
      const double p = std::exp(scores[t] - top);
      total += p;
      for (int i = 0; i < head_dim; i++)
        value[size_t(i)] += p * double(v[(size_t(a.first[r]) + t) * size_t(padded) + size_t(i)]);
    }
    // Values are rounded by 2^-9 (int8: 1/254 of the largest), scores by as much of their terms.
    const double bound = type == KV_F32 ? 1e-4 : type == KV_BF16 ? 0.06 : 0.25;
    for (int i = 0; i < head_dim; i++)
      if (!(std::fabs(double(out[size_t(r * padded + i)] / sum[size_t(r)]) -
                value[size_t(i)] / total) <= bound)) {
        fprintf(stderr, "attention, cache type %d, head %d, %d keys: row %d differs\n", type,
            head_dim, keys, r);
        exit(1);
      }
  }
}

// Both passes of resizing against plain sums, rows in exact allocations.
void check_resizing(size_t size, int count) {
  const Kernels* kernels = KERNELS();
  const int stride = (count + 3) / 4 * 4, wide = int(size) + count;
  std::vector<int32_t> weights(size * size_t(stride)), first(size), counts(size, count);
  for (size_t i = 0; i < size; i++) {
    first[i] = int32_t(rng() % size_t(wide - count + 1));
    for (int t = 0; t < count; t++)
      weights[i * size_t(stride) + size_t(t)] = int32_t(rng() % (3 << 21)) - (1 << 21);
  }
  auto byte = [](int64_t sum) {
    return uint8_t(std::clamp<int64_t>((sum + (1 << (WEIGHT_BITS - 1))) >> WEIGHT_BITS, 0, 255));
  };
  const size_t bytes = 3 * size_t(wide);
  std::vector<uint8_t> in(size_t(count) * bytes), down(bytes);
  for (uint8_t& b : in) b = uint8_t(rng() % 256 / size_t(count));  // sums of 32 bits
  kernels->resize_down(in.data(), bytes, weights.data(), count, bytes, down.data());
  for (size_t i = 0; i < bytes; i++) {
    int64_t sum = 0;
    for (int t = 0; t < count; t++) sum += int64_t(in[size_t(t) * bytes + i]) * weights[size_t(t)];
    if (down[i] != byte(sum)) fprintf(stderr, "resizing down, byte %zu differs\n", i), exit(1);
  }
  std::vector<uint8_t> row(bytes + READ_BEYOND), out(RESIZED_ROWS * 3 * size);
  for (uint8_t& b : row) b = uint8_t(rng() % 256 / size_t(count));
  const uint8_t* rows[RESIZED_ROWS];
  uint8_t* made[RESIZED_ROWS];
  for (size_t r = 0; r < RESIZED_ROWS; r++) rows[r] = row.data(), made[r] = &out[r * 3 * size];
  kernels->resize_across(
      rows, {int(size), stride, first.data(), counts.data(), weights.data()}, made);
  for (size_t i = 0; i < out.size(); i++) {
    const size_t x = i / 3 % size;
    int64_t sum = 0;
    for (size_t t = 0; t < size_t(count); t++)
      sum += int64_t(row[3 * (size_t(first[x]) + t) + i % 3]) * weights[x * size_t(stride) + t];
    if (out[i] != byte(sum)) fprintf(stderr, "resizing across, byte %zu differs\n", i), exit(1);
  }
}

}  // namespace

int main() {
  const struct { int type; const char* name; size_t block; int group = 0;
  } types[] = {{0, "F32", 1}, {1, "F16", 1}, {2, "Q4_0", 32}, {3, "Q4_1", 32}, {6, "Q5_0", 32},
      {7, "Q5_1", 32}, {8, "Q8_0", 32}, {10, "Q2_K", 256}, {11, "Q3_K", 256}, {12, "Q4_K", 256},
      {13, "Q5_K", 256}, {14, "Q6_K", 256},
      {20, "IQ4_NL", 32}, {39, "MXFP4", 32}, {30, "BF16", 1}, {1010, "INT4", 1, 32},
      {1011, "INT4_MIN", 1, 64}, {1012, "INT8", 1, 128}, {1013, "INT8_MIN", 1, 32},
      {1014, "TABLE4", 1, 64}, {1015, "FP8", 1, 128}};
  for (const auto& t : types)
    for (size_t n : {1, 16, 37})
      for (size_t blocks : {1, 3})
        for (int tokens : {1, 3, 30})
          for (std::optional<int> second : {std::optional<int>(), {0}, {1}, {2}, {GROUP_LINES}})
            check({t.type, t.group}, t.name, n, t.block * blocks * (t.block == 1 ? 24 : 1), tokens,
                second);
  for (KvType type : {KV_F32, KV_BF16, KV_INT8})
    for (int head_dim : {10, 64})
      for (int keys : {1, 16, 70, 256})
        for (int rows : {1, 3, 16}) check_attention(type, head_dim, keys, rows);
  for (size_t size : {1, 7, 33})
    for (int count : {1, 2, 5, 24}) check_resizing(size, count);
  puts("kernels: ok");
}
