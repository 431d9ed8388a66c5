#include "model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "checksum.h"
#include "cpu.h"
#include "logits.h"
#include "pack.h"

namespace octavo {
Model::Model(const std::string& isa, int threads, Limits limits)
    : Model(isa, threads, limits, std::make_unique<Arena>(), std::make_unique<Arena>()) {}

Model::Model(const std::string& isa, int threads, Limits limits, size_t weight_bytes, size_t buffer_bytes)
    : Model(isa, threads, limits, std::make_unique<Arena>(weight_bytes), std::make_unique<Arena>(buffer_bytes)) {}

Model::Model(const std::string& isa, int threads, Limits limits, std::unique_ptr<Arena> weights, std::unique_ptr<Arena> buffers)
    : kernels_(select_kernels(isa)), team_(buffers->writable() ? threads : 1), limits_(limits),
      weights_(std::move(weights)), buffers_arena_(std::move(buffers)) {
  context_.kernels = kernels_;
  context_.rooms.assign(size_t(threads), nullptr);
  context_.scratch.assign(size_t(threads), nullptr);
}

bool Model::map_weights(const char* path, size_t bytes) {
  uint64_t saved;
  auto mapped = Arena::from_file(path, bytes, saved);
  if (mapped && sum(mapped->data(), bytes) == saved) weights_ = std::move(mapped);
  return weights_->mapped();
}

uint64_t Model::sum(const uint8_t* data, size_t bytes) {
  constexpr size_t SECTION = size_t(1) << 20;
  std::vector<uint64_t> sums(align_up((bytes + SECTION - 1) / SECTION, CHECKSUM_LINE / sizeof(uint64_t)));
  team_.run([&](int thread, Work& work) {
    work.each(thread, int((bytes + SECTION - 1) / SECTION), 1, [&](int begin, int end) {
      for (size_t i = size_t(begin); i < size_t(end); i++) sums[i] = checksum(data + i * SECTION, std::min(SECTION, bytes - i * SECTION), i);
    });
  });
  return checksum(reinterpret_cast<const uint8_t*>(sums.data()), sums.size() * sizeof(uint64_t), bytes);
}

size_t Model::matrix_bytes(Storage s, size_t rows, size_t cols) {
  return align_up((rows + PANEL - 1) / PANEL * panel_bytes(panel_format(s.type), s.group, cols), 64);
}

Matrix& Model::new_matrix(Storage s, size_t data_bytes, size_t rows, size_t cols) {
  if (needs_weights() && data_bytes != stored_bytes(s, rows, cols)) throw std::invalid_argument("tensor bytes do not match its shape");
  const Format f = panel_format(s.type);
  uint8_t* panels = weights_->allocate<uint8_t>(matrix_bytes(s, rows, cols));
  matrices_.push_back(std::make_unique<Matrix>(Matrix{s, f, rows, cols, panel_bytes(f, s.group, cols), int(matrices_.size()), panels}));
  return *matrices_.back();
}

int Model::add_matrix(Storage s, const uint8_t* data, size_t data_bytes, size_t rows, size_t cols) {
  const Matrix& m = new_matrix(s, data_bytes, rows, cols);
  if (needs_weights()) team_.run([&](int thread, Work& work) {
    work.each(thread, m.panel_count(), 1, [&](int begin, int end) { m.pack(data, begin, end); });
  });
  return m.id;
}

int Model::add_stored(Storage s, const uint8_t* data, size_t data_bytes, size_t rows, size_t cols) {
  Matrix& m = new_matrix(s, data_bytes, rows, cols);
  m.stored = data;
  room_ = std::max(room_, Matrix::ROOM_PANELS * m.panel_bytes);
  return m.id;
}

void Model::read_stored() {
  if (!needs_weights()) return;
  constexpr size_t POPULATE_BYTES = size_t(16) << 20;
  for (const auto& m : matrices_) {
    const size_t bytes = m->stored ? m->bytes() : 0;
    team_.run([&](int thread, Work& work) {
      work.each(thread, int((bytes + POPULATE_BYTES - 1) / POPULATE_BYTES), 1, [&](int begin, int end) {
        populate(m->stored + size_t(begin) * POPULATE_BYTES, m->stored + std::min(bytes, size_t(end) * POPULATE_BYTES));
      });
    });
  }
}

bool Model::pack(size_t bytes) {
  for (; stored_ < matrices_.size(); stored_++) {
    Matrix& m = *matrices_[stored_];
    if (!m.stored) continue;
    if (!bytes) return true;
    const int from = m.packed, to = std::min(m.panel_count(), from + int((bytes + m.panel_bytes - 1) / m.panel_bytes));
    team_.run([&](int thread, Work& work) {
      work.each(thread, to - from, 1, [&](int begin, int end) { m.pack(m.stored, from + begin, from + end); });
    });
    m.packed = to;
    if (to < m.panel_count()) return true;
    bytes -= std::min(bytes, size_t(to - from) * m.panel_bytes);
    give_back(m.stored, m.stored + m.bytes());
    m.stored = nullptr;
  }
  return false;
}

int Model::add_vector(const float* data, size_t n) {
  float* p = weights_->allocate<float>(align_up(n, 16));
  if (needs_weights()) memcpy(p, data, n * sizeof(float));
  vectors_.push_back(p);
  return int(vectors_.size()) - 1;
}

int Model::add_buffer(Rows rows, int width) {
  const size_t stride = row_stride(width), count = size_t(row_count(rows)) * stride + SLACK;
  buffers_.push_back({rows, Buffer{buffers_arena_->allocate<float>(count), width, int(stride)}});
  return int(buffers_.size()) - 1;
}

int Model::add_act(Rows rows, int width, ActForms forms, bool apart, bool adapted_bf16, bool adapted_f32) {
  acts_.push_back({rows, allocate_input(*buffers_arena_, row_count(rows), width, forms, apart ? threads() : 0, adapted_bf16, adapted_f32)});
  return int(acts_.size()) - 1;
}

int Model::add_rope(const float* frequencies, int half, float factor) {
  float* f = buffers_arena_->allocate<float>(size_t(half));
  if (buffers_arena_->writable()) memcpy(f, frequencies, size_t(half) * sizeof(float));
  const Rotation out{buffers_arena_->allocate<float>(size_t(limits_.tokens) * size_t(half) * 2), half};
  prologue_.push_back(std::make_unique<RopeTableOp>(f, factor, out));
  ropes_.push_back(out);
  return int(ropes_.size()) - 1;
}

int Model::add_order(const int32_t* order, int n) {
  for (int i = 0; i < n; i++) if (order[i] < 0 || order[i] >= n) throw std::invalid_argument("not an order of features");
  int32_t* p = buffers_arena_->allocate<int32_t>(size_t(n));
  if (buffers_arena_->writable()) memcpy(p, order, size_t(n) * sizeof(int32_t));
  orders_.push_back(p);
  return int(orders_.size()) - 1;
}

int Model::add_schedule(int window, bool causal, int group) {
  context_.schedules.push_back({window, causal, group, {}, {}});
  return int(context_.schedules.size()) - 1;
}

void Model::embed(int matrix, int out, float scale, int index, int offset, bool replaceable) {
  int& known = known_[index];
  known = std::min(known, int(this->matrix(matrix)->rows) - offset);
  if (replaceable) embedding_width_ = buffer(out).width;
  ops_.push_back(std::make_unique<EmbedOp>(this->matrix(matrix), buffer(out), scale, Index(index), offset, replaceable));
}

void Model::select(int in, int out, int act_index) {
  ops_.push_back(std::make_unique<SelectOp>(buffer(in), buffer(out), act(act_index)));
}

void Model::layer_norm(int in, int weight, int bias, float eps, int out, int act_index) {
  const Rows rows = buffers_.at(size_t(in)).rows;
  ops_.push_back(std::make_unique<LayerNormOp>(rows, buffer(in), vector(weight), vector(bias), eps, buffer(out), act(act_index)));
}

void Model::norm(int in, int weight, float eps, int out, int residual, int act_index) {
  const Rows rows = buffers_.at(size_t(in)).rows;
  ops_.push_back(std::make_unique<NormOp>(rows, buffer(in), vector(weight), eps, buffer(out), buffer(residual), act(act_index)));
}

void Model::add(int a, int b, int out) {
  ops_.push_back(std::make_unique<AddOp>(buffers_.at(size_t(out)).rows, buffer(a), buffer(b), buffer(out)));
}

void Model::softcap(int b, float cap) {
  ops_.push_back(std::make_unique<SoftcapOp>(buffers_.at(size_t(b)).rows, buffer(b), cap));
}

void Model::emit(int in, int source, int order, int width, int act_index) {
  const int32_t* by = order < 0 ? nullptr : orders_.at(size_t(order));
  ops_.push_back(std::make_unique<EmitOp>(acts_.at(size_t(act_index)).rows, buffer(in), act(source), by, width, act(act_index)));
}

void Model::linear(int act_index, const std::vector<Part>& parts, int residual) {
  std::vector<LinearPart> p;
  if (context_.low_rank && acts_.at(size_t(act_index)).rows == Rows::tokens) {
    if (parts.size() > ADAPTED_PARTS) throw std::invalid_argument("too many matrices share an input");
    std::vector<int> ids;
    for (const Part& x : parts) ids.push_back(x.matrix);
    ops_.push_back(std::make_unique<LowRankOp>(act(act_index), ids));
  }
  for (const Part& x : parts) p.push_back({matrix(x.matrix), buffer(x.out), vector(x.bias), buffer(residual).data});
  ops_.push_back(std::make_unique<LinearOp>(acts_.at(size_t(act_index)).rows, act(act_index), std::move(p)));
}

void Model::gated(int in, const Part& gate, const Part& up, int kind, int mid, int act_index) {
  const RowAct& source = acts_.at(size_t(in));
  if (context_.low_rank && source.rows == Rows::tokens)
    ops_.push_back(std::make_unique<LowRankOp>(source.input, std::vector<int>{gate.matrix, up.matrix}));
  auto part = [&](const Part& p) {
    return p.matrix < 0 ? LinearPart{} : LinearPart{matrix(p.matrix), Buffer{}, vector(p.bias), nullptr};
  };
  ops_.push_back(std::make_unique<GatedOp>(source.rows, source.input, part(gate), part(up), kind, buffer(mid), act(act_index)));
}

void Model::glu(int gate, int up, int kind, int act_index) {
  ops_.push_back(std::make_unique<GluOp>(buffers_.at(size_t(gate)).rows, buffer(gate), buffer(up), kind, act(act_index)));
}

void Model::attention(const Attention& a) {
  AttentionSpec s{buffer(a.q), buffer(a.k), buffer(a.v), a.layer, a.heads, a.kv_heads, a.head_dim, a.schedule, a.scale,
                  vector(a.q_norm), vector(a.k_norm), a.eps, a.rope < 0 ? Rotation{} : ropes_.at(size_t(a.rope)), a.interleaved, a.softcap, vector(a.sinks), act(a.act)};
  attended_.push_back({a.layer, a.heads, a.kv_heads, a.head_dim});
  ops_.push_back(std::make_unique<AttentionOp>(s));
}

void Model::route(int in, int out, int top, bool normalize) {
  ops_.push_back(std::make_unique<RouteOp>(buffer(in), buffer(out), top, normalize));
}

int Model::add_expert_rows(int experts, int top, int hidden, int ffn, ActForms in, ActForms mid) {
  expert_rows_.push_back(allocate_expert_rows(*buffers_arena_, limits_.tokens, experts, top, hidden, ffn, in, mid));
  return int(expert_rows_.size()) - 1;
}

void Model::experts(int x, int routes, const std::vector<ExpertParts>& parts, int kind, int rows, int out, int residual) {
  std::vector<Expert> e;
  auto part = [&](int matrix, int bias) { return Expert::Part{this->matrix(matrix), vector(bias)}; };
  for (const ExpertParts& p : parts) e.push_back({part(p.gate, p.gate_bias), part(p.up, p.up_bias), part(p.down, p.down_bias)});
  ops_.push_back(std::make_unique<ExpertsOp>(buffer(x), buffer(routes), std::move(e), kind, *expert_rows_.at(size_t(rows)), buffer(out), buffer(residual)));
}

void Model::output(int b, int width, bool last) {
  output_ = b;
  context_.head = logits().data;
  width_ = width;
  last_ = last;
  size_t scratch = 0;
  for (const auto& op : ops_) scratch = std::max(scratch, op->scratch_floats(std::max(limits_.tokens, limits_.selected)));
  for (float*& s : context_.scratch) s = buffers_arena_->allocate<float>(row_stride(int(scratch)) + 2 * SLACK);
  for (uint8_t*& r : context_.rooms) r = buffers_arena_->allocate<uint8_t>(room_);
  context_.statistics_stride = Logits::statistics_floats(width);
  if (buffers_[size_t(b)].rows == Rows::selected) context_.statistics = buffers_arena_->allocate<float>(size_t(limits_.selected) * context_.statistics_stride);
}

void Model::allow_adapters() {
  context_.low_rank_tokens = limits_.tokens;
  context_.low_rank = buffers_arena_->allocate<float>(size_t(ADAPTED_PARTS) * size_t(limits_.tokens) * MAX_RANK);
}

int Model::add_adapter(const std::vector<Adapter::Part>& parts) {
  for (const Adapter::Part& p : parts) {
    const Matrix& m = *matrix(p.matrix);
    if (p.rank < 1 || p.rank > MAX_RANK || p.inputs != m.cols || p.outputs != m.rows) throw std::invalid_argument("an adapter does not fit its matrix");
    if (p.type != GGML_F32 && p.type != GGML_BF16) throw std::invalid_argument("adapters are fp32 or bf16");
  }
  size_t slot = 0;
  while (slot < adapters_.size() && adapters_[slot]) slot++;
  if (slot == adapters_.size()) adapters_.emplace_back();
  adapters_[slot] = std::make_unique<Adapter>(parts);
  return int(slot);
}

void Model::remove_adapter(int slot) { adapters_.at(size_t(slot)).reset(); }

void Model::allocate_cache(const std::vector<KvShape>& layers, int blocks, KvType type, int parts) {
  KvCache& kv = context_.kv;
  kv.blocks = blocks, kv.type = type;
  for (const KvShape& s : layers) {
    if (s.head_dim > WIDEST_HEAD) throw std::invalid_argument("attention heads wider than 512 are not supported");
    const int padded = int(align_up(size_t(s.head_dim), 16));
    kv.layers.push_back({nullptr, s, padded, kv_head_bytes(type, padded), kv_block_bytes(type, s)});
  }
  const size_t bytes = kv.block_bytes() * size_t(blocks);
  cache_ = buffers_arena_->writable() ? std::make_unique<Arena>(bytes) : std::make_unique<Arena>();
  uint8_t* data = cache_->allocate<uint8_t>(bytes);
  for (KvLayer& l : kv.layers)
    if (data) l.data = data, data += l.block_bytes * size_t(blocks);
  size_t heads = 0, values = 0;  // of the widest attention
  for (const Attended& a : attended_) {
    const bool has = a.layer >= 0 && size_t(a.layer) < layers.size();
    const KvShape s = has ? layers[size_t(a.layer)] : KvShape{};
    if (s.heads != a.kv_heads || s.head_dim != a.head_dim) throw std::invalid_argument("an attention does not fit its layer's cache");
    heads = std::max(heads, size_t(a.heads));
    values = std::max(values, size_t(a.heads) * align_up(size_t(a.head_dim), 16));
  }
  context_.part_capacity = parts;
  context_.part_max = buffers_arena_->allocate<float>(size_t(parts) * heads);
  context_.part_sum = buffers_arena_->allocate<float>(size_t(parts) * heads);
  context_.part_out = buffers_arena_->allocate<float>(size_t(parts) * values);
}

bool Model::prefault_kv(int reached, size_t ahead, size_t bytes) {
  const KvCache& kv = context_.kv;
  const size_t each = kv.block_bytes();
  const int margin = int(std::min(size_t(kv.blocks), ahead / each));
  if (prefaulted_ - reached < margin / 2) claiming_ = std::min(kv.blocks, reached + margin);
  if (prefaulted_ >= claiming_) return false;
  const int from = std::max(prefaulted_, reached);
  prefaulted_ = int(std::min(size_t(claiming_), size_t(from) + bytes / each + 1));
  team_.run([&](int thread, Work& work) {
    work.each(thread, int(kv.layers.size()), 1, [&](int begin, int end) {
      for (int l = begin; l < end; l++) octavo::prefault(kv.layers[size_t(l)].at(from, 0), kv.layers[size_t(l)].at(prefaulted_, 0));
    });
  });
  return prefaulted_ < claiming_;
}

void Model::copy_block(int from, int to) {
  const KvCache& kv = context_.kv;
  if (from < 0 || to < 0 || from >= kv.blocks || to >= kv.blocks) throw std::invalid_argument("no such KV block");
  for (const KvLayer& l : kv.layers) memcpy(l.at(to, 0), l.at(from, 0), l.block_bytes);
}

void Model::check(const Step& s) const {
  if (s.tokens < 1 || s.tokens > limits_.tokens || s.selected > limits_.selected) throw std::invalid_argument("step exceeds the limits of the model");
  const int32_t* given[] = {s.ids, s.positions, s.types};
  for (int index = 0; index < 3; index++)
    for (int t = 0; given[index] && t < s.tokens; t++)
      if (given[index][t] < 0 || given[index][t] >= known_[index]) throw std::invalid_argument("a token, position or type is outside its table");
  for (int i = 0; i < s.selected; i++)
    if (s.select[i] < 0 || s.select[i] >= s.tokens) throw std::invalid_argument("a selected row is outside the step");
  check_spans(s);
  if (s.embedded) check_embeddings(s);
}

void Model::check_spans(const Step& s) const {
  int next = 0;
  for (const Span& x : s.spans) {
    const bool rows = x.first == next && x.count >= 1 && x.count <= s.tokens - x.first && x.position >= 0 && x.table >= 0;
    const int64_t blocks = rows ? (int64_t(x.position) + x.count + BLOCK - 1) / BLOCK : 0;
    if (!rows || blocks > s.blocks - x.table) throw std::invalid_argument("a span is outside the step");
    for (int64_t b = 0; b < blocks; b++)
      if (s.tables[x.table + b] < 0 || s.tables[x.table + b] >= context_.kv.blocks) throw std::invalid_argument("no such KV block");
    next += x.count;
  }
  if (next != s.tokens) throw std::invalid_argument("rows of the step are in no span");
}

void Model::check_embeddings(const Step& s) const {
  if (s.embedding_width != embedding_width_) throw std::invalid_argument("the model takes no embeddings of this width");
  for (int i = 0; i < s.embedded; i++)
    if (s.embedding_rows[i] >= s.tokens || s.embedding_rows[i] < (i ? s.embedding_rows[i - 1] + 1 : 0))
      throw std::invalid_argument("embeddings are for rows of the step, in ascending order");
  for (size_t i = 0; i < size_t(s.embedded) * size_t(s.embedding_width); i++)
    if (!std::isfinite(s.embeddings[i])) throw std::invalid_argument("embeddings are finite numbers");
}

// At the positions of their rows.
void Model::place_kv_writes(Step& s) const {
  for (KvWrite& w : s.kv_writes) {
    if (w.row < 0 || w.row >= s.tokens || w.table < 0) throw std::invalid_argument("a KV write is outside the step");
    const auto span = std::find_if(s.spans.begin(), s.spans.end(), [&](const Span& x) { return w.row < x.first + x.count; });
    w.position = span->position + w.row - span->first;
    if (w.position / BLOCK >= s.blocks - w.table) throw std::invalid_argument("a KV write is outside the step");
    const int32_t block = s.tables[w.table + w.position / BLOCK];
    if (block < 0 || block >= context_.kv.blocks) throw std::invalid_argument("no such KV block");
  }
}

void Model::plan_head(const std::vector<SamplingRow>& sampling) {
  plan_live(sampling);
  context_.measured = last_ && context_.live.empty();
  context_.inverses.assign(size_t(context_.step.selected), 0);
  for (size_t i = 0; i < sampling.size(); i++) context_.inverses[i] = summed_inverse(sampling[i], width_);
}

// Panels of the head without a token that may be drawn need not be computed, unless log-probabilities sum over them.
void Model::plan_live(const std::vector<SamplingRow>& sampling) {
  context_.live.clear();
  if (context_.step.all_logits && int(sampling.size()) < context_.step.selected) return;
  for (const SamplingRow& r : sampling) if (!r.mask || r.logprobs >= 0) return;
  context_.live.assign(size_t(width_ + PANEL - 1) / PANEL, 0);
  for (size_t p = 0; p < context_.live.size(); p++)
    for (const SamplingRow& r : sampling) context_.live[p] |= uint16_t(r.mask[p / 2] >> (p % 2 * PANEL)) != 0;
}

std::vector<Sample> Model::step(const Step& step, const std::vector<SamplingRow>& sampling) {
  if (!buffers_arena_->writable()) throw std::logic_error("a model that only counts cannot be run");
  check(step);
  context_.step = step;
  place_kv_writes(context_.step);
  plan_head(sampling);
  context_.runs.clear();
  for (const Span& s : step.spans)
    if (s.adapter >= 0) {
      if (!adapters_.at(size_t(s.adapter))) throw std::invalid_argument("no such adapter");
      context_.runs.push_back({adapters_[size_t(s.adapter)].get(), s.first, s.count});
    }
  context_.reads_bf16 = context_.reads_f32 = false;
  for (const AdapterRun& run : context_.runs)
    context_.reads_bf16 |= run.adapter->reads(BF16), context_.reads_f32 |= run.adapter->reads(F32);
  for (Schedule& s : context_.schedules) plan_attention(context_, s);
  std::vector<Sample> samples(sampling.size());
  profile_.begin();
  team_.run([&](int thread, Work& work) {
    for (auto* list : {&prologue_, &ops_})
      for (size_t i = 0; i < list->size(); i++) {
        Op* op = (*list)[i].get();
        if (thread == 0) operations_.fetch_add(1, std::memory_order_relaxed);
        if (i + 1 < list->size()) (*list)[i + 1]->fetch(thread, work);  // so that memory is busy where this one is not
        for (int p = 0; p < op->phases(); p++) {
          if (!op->idle(context_)) op->run(context_, p, thread, work);
          if (thread == 0) profile_.mark([&] { return op->name(p); });
        }
      }
    work.each(thread, int(sampling.size()), 1, [&](int begin, int end) {
      for (int i = begin; i < end; i++)
        samples[size_t(i)] = sample(*kernels_, logits().row(i), context_.statistics_of(i), context_.measured, width_, sampling[size_t(i)]);
    });
  });
  profile_.mark([] { return std::string("sample"); });
  profile_.end();
  return samples;
}

std::vector<std::vector<Sample>> Model::decode(Step step, std::vector<SamplingRow> sampling, int steps, const std::vector<std::vector<int32_t>>& ends) {
  const size_t n = size_t(step.tokens);
  if (step.spans.size() != n || sampling.size() != n || ends.size() != n || step.selected != step.tokens || step.embedded || !step.kv_writes.empty())
    throw std::invalid_argument("only single tokens that are all sampled can be decoded in a row");
  std::vector<int32_t> ids(step.ids, step.ids + n), positions(step.positions, step.positions + n);
  step.ids = ids.data(), step.positions = positions.data();
  std::vector<std::vector<Sample>> out;
  for (bool ended = false; !ended && int(out.size()) < steps;) {
    out.push_back(this->step(step, sampling));
    for (size_t i = 0; i < n; i++) {
      const int32_t token = out.back()[i].token;
      ended |= token == NO_TOKEN || std::find(ends[i].begin(), ends[i].end(), token) != ends[i].end();
      ids[i] = token;
      positions[i]++, step.spans[i].position++, sampling[i].position++;
    }
  }
  return out;
}

}  // namespace octavo
