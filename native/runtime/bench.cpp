#include "bench.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "act.h"
#include "cpu.h"
#include "memory.h"
#include "ops.h"
#include "pack.h"
#include "pool.h"

namespace octavo {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Least time of f() within the budget, at least three runs.
template <class F> double least(double seconds, F&& f) {
  double best = 1e9;
  const double until = now() + seconds;
  for (int i = 0; i < 3 || now() < until; i++) {
    const double began = now();
    f(i);
    best = std::min(best, now() - began);
  }
  return best;
}

// Bytes that are ordinary numbers wherever a format has a scale or a float.
void fill(uint8_t* p, size_t n) {
  uint32_t x = 1;
  for (size_t i = 0; i < n; i++) p[i] = uint8_t(0x30 | ((x = x * 1664525 + 1013904223) >> 28));
}

}  // namespace

HostLimits measure_limits(const std::string& isa, int threads, size_t bytes, double seconds) {
  const Kernels* k = select_kernels(isa);
  ThreadPool pool(threads);
  Arena arena(bytes);
  uint8_t* data = arena.allocate<uint8_t>(bytes);
  memset(data, 1, bytes);
  std::vector<uint64_t> sums(static_cast<size_t>(threads) * 8);
  const size_t share = bytes / size_t(threads) / 256 * 256;
  const double read = least(seconds, [&](int) {
    pool.run([&](int t) { sums[size_t(t) * 8] += k->read(data + size_t(t) * share, share); });
  });
  auto gops = [&](double (*multiply)(long, int32_t*), long rounds) {
    double ops = 0;
    const double took = least(seconds, [&](int) {
      pool.run([&](int t) {
        int32_t sink[16];
        const double done = multiply(rounds, sink);
        if (t == 0) ops = done;
      });
    });
    return ops * threads / took / 1e9;
  };
  return {double(share) * threads / read / 1e9, gops(k->multiply_registers, 200000),
      gops(k->multiply, 50000)};
}

double time_linear(const std::string& isa, int type, int group, size_t rows, size_t cols,
    std::optional<int> second_lines, int tokens, int threads, int copies, double seconds) {
  const Kernels* k = select_kernels(isa);
  const Format format = panel_format(type);
  const size_t padded = padded_cols(cols), bytes = panel_bytes(format, group, cols),
               panels = (rows + PANEL - 1) / PANEL;
  const size_t matrix = align_up(panels * bytes, 64), outputs = size_t(tokens) * panels * PANEL;
  const ActForms forms = every_form(second_lines);
  ThreadPool pool(threads);
  Work work(threads);
  Arena arena(size_t(copies) * matrix + act_bytes(tokens, int(cols), forms) + outputs * 4 +
      (size_t(1) << 20));
  std::vector<uint8_t> source(stored_bytes({type, group}, rows, cols));
  fill(source.data(), source.size());
  uint8_t* packed = arena.allocate<uint8_t>(size_t(copies) * matrix);
  for (size_t p = 0; p < panels; p++)
    pack_panel({type, group}, source.data(), rows, cols, p, packed + p * bytes);
  for (int c = 1; c < copies; c++) memcpy(packed + size_t(c) * matrix, packed, matrix);
  const Act act = allocate_act(arena, tokens, int(cols), forms);
  std::vector<float> line(padded);
  for (size_t i = 0; i < cols; i++) line[i] = float(int(i * 7919 % 1000) - 500) / 500;
  for (int t = 0; t < tokens; t++) k->emit(act, t, line.data());
  float* out = arena.allocate<float>(outputs);
  const int chunk = linear_chunk(bytes);
  return least(seconds, [&](int i) {
    const uint8_t* weights = packed + size_t(i % copies) * matrix;
    pool.run([&](int thread) {
      work.each(thread, int(panels), chunk, [&](int begin, int end) {
        k->linear[format]({weights, bytes, int(padded), act, tokens, out, int(panels) * PANEL,
                              nullptr, nullptr, group},
            begin, end);
      });
    });
  });
}

double time_attention(
    const std::string& isa, int kv_type, int head_dim, int queries, int keys, double seconds) {
  const Kernels* k = select_kernels(isa);
  const KvType type = KvType(kv_type);
  const int padded = int(align_up(size_t(head_dim), 16)), blocks = (keys + BLOCK - 1) / BLOCK;
  const size_t bytes = kv_head_bytes(type, padded);
  Arena arena(size_t(blocks) * bytes + size_t(ATTEND_ROWS * padded) * 12 + (size_t(1) << 20));
  AttendArgs a{};
  uint8_t* pool = arena.allocate<uint8_t>(size_t(blocks) * bytes);
  std::vector<int32_t> table;
  std::vector<float> x(static_cast<size_t>(padded) + SLACK, 0.25f);
  for (int b = 0; b < blocks; b++) table.push_back(b);
  for (int t = 0; t < keys; t++) {
    k->store_k(x.data(), head_dim, padded, t % BLOCK, type, pool + size_t(t / BLOCK) * bytes);
    k->store_v(x.data(), head_dim, padded, t % BLOCK, type, pool + size_t(t / BLOCK) * bytes);
  }
  uint8_t* q = arena.allocate<uint8_t>(size_t(ATTEND_ROWS * padded) * 4);
  float *out = arena.allocate<float>(size_t(ATTEND_ROWS * padded)), max[ATTEND_ROWS],
        sum[ATTEND_ROWS];
  for (int r = 0; r < queries; r++) {
    k->store_q(x.data(), head_dim, padded, 0.125f, type, q + size_t(r * padded) * 4);
    a.q[r] = q + size_t(r * padded) * 4, a.last[r] = keys - 1, a.max[r] = max + r,
    a.sum[r] = sum + r, a.out[r] = out + r * padded;
  }
  a.rows = queries, a.fetch = true, a.head_dim = padded, a.block_stride = bytes,
  a.keys = {pool, table.data(), 0, 0};
  return least(seconds, [&](int) {
    for (int i = 0; i < keys; i += KV_CHUNK)
      a.keys.begin = i, a.keys.end = std::min(i + KV_CHUNK, keys), k->attend[type](a);
  });
}

}  // namespace octavo
