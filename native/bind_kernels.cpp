// Kernels and the sampler by themselves, for tests and benchmarks.
#include "bind.h"

namespace {

// Kernel under test: y[m][rows] = x[m][cols] * W^T, in calls of `tile` tokens.
auto linear(const std::string& isa, int type, int group, Bytes data, size_t rows, size_t cols,
    Matrix2 x, int tile, std::optional<float> threshold) {
  const Kernels* k = select_kernels(isa);
  const Format format = panel_format(type);
  const size_t m = x.shape(0), padded = padded_cols(cols), bytes = panel_bytes(format, group, cols),
               panels = (rows + 15) / 16;
  if (x.shape(1) != cols || data.size() != stored_bytes({type, group}, rows, cols))
    throw std::invalid_argument("shapes disagree");
  const ActForms forms = every_form(threshold);
  Arena arena(panels * bytes + act_bytes(tile, int(cols), forms) +
      panels * 16 * m * 4 + (size_t(1) << 20));
  uint8_t* packed = arena.allocate<uint8_t>(panels * bytes);
  for (size_t p = 0; p < panels; p++)
    pack_panel({type, group}, data.data(), rows, cols, p, packed + p * bytes);
  const Act act = allocate_act(arena, tile, int(cols), forms);
  float* line = arena.allocate<float>(padded);
  float* out = arena.allocate<float>(m * panels * 16);
  for (size_t t = 0; t < m; t += size_t(tile)) {
    const int count = int(t + size_t(tile) < m ? size_t(tile) : m - t);
    for (int i = 0; i < count; i++) {
      memcpy(line, x.data() + (t + size_t(i)) * cols, cols * sizeof(float));
      k->emit(act, i, line);
    }
    k->linear[format]({packed, bytes, int(padded), act, count, out + t * panels * 16,
                          int(panels * 16), nullptr, nullptr, group},
        0, int(panels));
  }
  float* y;
  auto result = new_matrix(m, rows, y);
  for (size_t t = 0; t < m; t++) memcpy(y + t * rows, out + t * panels * 16, rows * sizeof(float));
  return result;
}

auto unpack(int type, int group, Bytes data, size_t rows, size_t cols) {
  const Format format = panel_format(type);
  if (data.size() != stored_bytes({type, group}, rows, cols))
    throw std::invalid_argument("shapes disagree");
  std::vector<uint8_t> panel(panel_bytes(format, group, cols));
  float* y;
  auto result = new_matrix(rows, cols, y);
  for (size_t r = 0; r < rows; r++) {
    if (r % 16 == 0) pack_panel({type, group}, data.data(), rows, cols, r / 16, panel.data());
    unpack_row(format, group, panel.data(), int(r % 16), cols, y + r * cols);
  }
  return result;
}

}  // namespace

void bind_kernels(nb::module_& m) {
  m.def("is_fixed", [](int type) { return is_fixed(panel_format(type)); });
  m.def("matrix_bytes", [](int type, int group, size_t rows, size_t cols) {
    return Model::matrix_bytes({type, group}, rows, cols);
  });
  m.def("cache_block_bytes", [](int heads, int head_dim, const std::string& type) {  // of one layer
    return kv_block_bytes(kv_type(type), {heads, head_dim});
  });
  m.def("uniform", &uniform, "seed"_a, "position"_a);
  m.def("linear", &linear, "isa"_a, "type"_a, "group"_a, "data"_a, "rows"_a, "cols"_a, "x"_a,
      "tile"_a, "threshold"_a = nb::none());
  m.def("unpack", &unpack, "type"_a, "group"_a, "data"_a, "rows"_a, "cols"_a);
  m.def("measure_limits", [](const std::string& isa, int threads, size_t bytes, double seconds) {
    nb::gil_scoped_release release;
    const HostLimits l = measure_limits(isa, threads, bytes, seconds);
    return std::make_tuple(l.read_gbs, l.registers_gops, l.widest_gops);
  }, "isa"_a, "threads"_a, "bytes"_a, "seconds"_a);
  m.def("time_linear", &time_linear, "isa"_a, "type"_a, "group"_a, "rows"_a, "cols"_a,
      "threshold"_a.none(), "tokens"_a, "threads"_a, "copies"_a, "seconds"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "time_attention",
      [](const std::string& isa, const std::string& type, int head_dim, int queries, int keys,
          double seconds) {
        if (queries < 1 || queries > ATTEND_ROWS)
          throw std::invalid_argument("between 1 and 16 queries");
        return time_attention(isa, kv_type(type), head_dim, queries, keys, seconds);
      },
      "isa"_a, "type"_a, "head_dim"_a, "queries"_a, "keys"_a, "seconds"_a);
  m.def(
      "sample",
      [](const std::string& isa, Floats logits, nb::handle r,
          bool measured) {  // as the head measures
        const int n = int(logits.size());
        const Kernels* k = select_kernels(isa);
        std::vector<float> values(size_t(set_count(n)) * SET_TOKENS),
            statistics(Logits::statistics_floats(n));
        memcpy(values.data(), logits.data(), logits.size() * sizeof(float));
        std::vector<Adjustment> a;
        const SamplingRow row = sampling_row(r, n, a);
        Logits l(*k, values.data(), n, statistics.data());
        for (int set = 0; measured && set < set_count(n); set++)
          l.measure(set, summed_inverse(row, n));
        Sample s = sample(*k, values.data(), statistics.data(), measured, n, row);
        return SampleTuple(s.token, s.logprob, s.top_tokens, s.top_logprobs);
      },
      "isa"_a, "logits"_a, "row"_a, "measured"_a = false);
}
