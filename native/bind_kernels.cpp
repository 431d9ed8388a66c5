// Kernels and the sampler by themselves, for tests and benchmarks.
#include "bind.h"

namespace {

// Kernel under test: y[m][rows] = x[m][cols] * W^T, in calls of `tile` tokens.
auto linear(const std::string& isa, int type, int group, Bytes data, size_t rows, size_t cols,
    Matrix2 x, int tile, std::optional<int> second_lines, bool remainder) {
  const Kernels* k = select_kernels(isa);
  const Format format = panel_format(type);
  const size_t m = x.shape(0), padded = padded_cols(cols), bytes = panel_bytes(format, group, cols),
               panels = (rows + 15) / 16;
  if (x.shape(1) != cols || data.size() != stored_bytes({type, group}, rows, cols))
    throw std::invalid_argument("shapes disagree");
  ActForms forms = every_form(second_lines);
  forms.remainder = remainder;
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

// Attention under test: query t sees keys first[t] to last[t], in calls of `tile` queries. Keys and
// values lie in blocks that held `former` everywhere.
auto attend(const std::string& isa, const std::string& type, Matrix2 q, Matrix2 k, Matrix2 v,
    Ints first, Ints last, float scale, float softcap, float former, int tile,
    bool remainder) {
  const Kernels* kernels = select_kernels(isa);
  const KvType kind = kv_type(type);
  const size_t rows = q.shape(0), keys = k.shape(0), head = q.shape(1), padded = align_up(head, 16),
               blocks = (keys + BLOCK - 1) / BLOCK, bytes = kv_head_bytes(kind, int(padded)),
               chunks = (keys + KV_CHUNK - 1) / KV_CHUNK;
  if (k.shape(1) != head || v.shape(1) != head || v.shape(0) != keys || first.size() != rows ||
      last.size() != rows || head > WIDEST_HEAD || tile < 1 || tile > ATTEND_ROWS)
    throw std::invalid_argument("shapes disagree");
  Arena arena(blocks * bytes + rows * padded * 4 * (chunks + 1) + (size_t(1) << 20));
  uint8_t* pool = arena.allocate<uint8_t>(blocks * bytes);
  std::vector<int32_t> table(blocks);
  std::vector<float> line(padded + SLACK), max(rows * chunks), sum(max);
  auto store = [&](size_t t, const float* key, const float* value) {
    uint8_t* block = pool + size_t(table[t / BLOCK]) * bytes;
    memcpy(line.data(), key, head * sizeof(float));
    kernels->store_k(line.data(), int(head), int(padded), int(t % BLOCK), kind, block);
    memcpy(line.data(), value, head * sizeof(float));
    kernels->store_v(line.data(), int(head), int(padded), int(t % BLOCK), kind, block);
  };
  for (size_t b = 0; b < blocks; b++) table[b] = int32_t(blocks - 1 - b);
  const std::vector<float> old(head, former);
  for (size_t t = 0; t < blocks * BLOCK; t++) store(t, old.data(), old.data());
  for (size_t t = 0; t < keys; t++) store(t, k.data() + t * head, v.data() + t * head);
  uint8_t* queries = arena.allocate<uint8_t>(rows * padded * 4);
  float *out = arena.allocate<float>(rows * chunks * padded), *y;
  for (size_t r = 0; r < rows; r++) {
    memcpy(line.data(), q.data() + r * head, head * sizeof(float));
    kernels->store_q(
        line.data(), int(head), int(padded), scale, kind, queries + r * padded * 4);
  }
  auto result = new_matrix(rows, head, y);
  for (size_t begin = 0; begin < rows; begin += size_t(tile)) {
    AttendArgs a{};
    a.rows = int(std::min(size_t(tile), rows - begin)), a.softcap = softcap;
    a.remainder = remainder;
    a.head_dim = int(padded), a.block_stride = bytes, a.fetch = true;
    for (size_t c = 0; c < chunks; c++) {
      a.keys = a.next = {pool, table.data(), int(c) * KV_CHUNK, 0};
      a.keys.end = std::min((int(c) + 1) * KV_CHUNK, int(keys));
      a.next.begin = a.keys.end, a.next.end = int(keys);
      for (int r = 0; r < a.rows; r++) {
        const size_t row = begin + size_t(r), at = row * chunks + c;
        a.q[r] = queries + row * padded * 4, a.first[r] = first.data()[row],
        a.last[r] = last.data()[row], a.max[r] = &max[at], a.sum[r] = &sum[at],
        a.out[r] = out + at * padded;
      }
      kernels->attend[kind](a);
    }
  }
  for (size_t r = 0; r < rows; r++)
    kernels->combine(&max[r * chunks], &sum[r * chunks], out + r * chunks * padded, int(chunks), 1,
        int(padded), int(head), nullptr, y + r * head);
  return result;
}

}  // namespace

void bind_kernels(nb::module_& m) {
  m.def("is_fixed", [](int type) { return is_fixed(panel_format(type)); });
  m.def("has_halves", [](int type) { return has_halves(panel_format(type)); });
  m.def("matrix_bytes", [](int type, int group, size_t rows, size_t cols) {
    return Model::matrix_bytes({type, group}, rows, cols);
  });
  m.def("cache_block_bytes", [](int heads, int head_dim, const std::string& type) {  // of one layer
    return kv_block_bytes(kv_type(type), {heads, head_dim});
  });
  m.def("uniform", &uniform, "seed"_a, "position"_a);
  m.def("linear", &linear, "isa"_a, "type"_a, "group"_a, "data"_a, "rows"_a, "cols"_a, "x"_a,
      "tile"_a, "second_lines"_a = nb::none(), "remainder"_a = true);
  m.def("attend", &attend, "isa"_a, "type"_a, "q"_a, "k"_a, "v"_a, "first"_a, "last"_a, "scale"_a,
      "softcap"_a, "former"_a, "tile"_a, "remainder"_a = true);
  m.def("unpack", &unpack, "type"_a, "group"_a, "data"_a, "rows"_a, "cols"_a);
  m.def("measure_limits", [](const std::string& isa, int threads, size_t bytes, double seconds) {
    nb::gil_scoped_release release;
    const HostLimits l = measure_limits(isa, threads, bytes, seconds);
    return std::make_tuple(l.read_gbs, l.registers_gops, l.widest_gops);
  }, "isa"_a, "threads"_a, "bytes"_a, "seconds"_a);
  m.def("time_linear", &time_linear, "isa"_a, "type"_a, "group"_a, "rows"_a, "cols"_a,
      "second_lines"_a.none(), "tokens"_a, "threads"_a, "copies"_a, "seconds"_a,
      nb::call_guard<nb::gil_scoped_release>());
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
