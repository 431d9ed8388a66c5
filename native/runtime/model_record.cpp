// Recording: each call appends an operation, or a place that operations use.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "logits.h"
#include "model.h"

namespace octavo {
int Model::add_buffer(Rows rows, int width) {
  const size_t stride = row_stride(width), count = size_t(row_count(rows)) * stride + SLACK;
  buffers_.push_back({rows, Buffer{buffers_arena_->allocate<float>(count), width, int(stride)}});
  return int(buffers_.size()) - 1;
}

int Model::add_act(
    Rows rows, int width, ActForms forms, bool apart, bool adapted_bf16, bool adapted_f32) {
  acts_.push_back({rows,
      allocate_input(*buffers_arena_, row_count(rows), width, forms, apart ? threads() : 0,
          adapted_bf16, adapted_f32)});
  return int(acts_.size()) - 1;
}

int Model::add_rope(
    const float* frequencies, int half, float factor, std::vector<int32_t> axes) {
  if (!axes.empty() && axes.size() != size_t(half))
    throw std::invalid_argument("a rotation has an axis for each frequency, or none");
  for (int32_t axis : axes) {
    if (axis < 0) throw std::invalid_argument("no such axis");
    axes_ = std::max(axes_, int(axis) + 1);
  }
  float* f = buffers_arena_->allocate<float>(size_t(half));
  if (buffers_arena_->writable()) memcpy(f, frequencies, size_t(half) * sizeof(float));
  const Rotation out{
      buffers_arena_->allocate<float>(size_t(limits_.tokens) * size_t(half) * 2), half};
  prologue_.push_back(std::make_unique<RopeTableOp>(f, factor, std::move(axes), out));
  ropes_.push_back(out);
  return int(ropes_.size()) - 1;
}

int Model::add_order(const int32_t* order, int n) {
  for (int i = 0; i < n; i++)
    if (order[i] < 0 || order[i] >= n) throw std::invalid_argument("not an order of features");
  int32_t* p = buffers_arena_->allocate<int32_t>(size_t(n));
  if (buffers_arena_->writable()) memcpy(p, order, size_t(n) * sizeof(int32_t));
  orders_.push_back(p);
  return int(orders_.size()) - 1;
}

int Model::add_schedule(int window, bool causal, int group, bool segmented, bool selected) {
  if (segmented && (causal || window))
    throw std::invalid_argument("segments are for attention to both sides, without a window");
  context_.schedules.push_back({window, causal, group, segmented, selected, false, {}, {}});
  return int(context_.schedules.size()) - 1;
}

void Model::embed(int matrix, int out, float scale, int index, int offset, bool replaceable) {
  const Matrix* table = matrix < 0 ? nullptr : this->matrix(matrix);
  if (table) known_[index] = std::min(known_[index], int(table->rows) - offset);
  if (replaceable) {
    embedding_width_ = std::max(embedding_width_, buffer(out).width);
    all_embedded_ = !table;
  }
  ops_.push_back(std::make_unique<EmbedOp>(
      table, buffer(out), scale, Index(index), offset, replaceable));
}

void Model::inject(int in, int out, int first) {
  if (first < 0) throw std::invalid_argument("no such columns");
  embedding_width_ = std::max(embedding_width_, first + buffer(out).width);
  ops_.push_back(std::make_unique<InjectOp>(buffer(in), buffer(out), first));
}

void Model::select_rows(int in, int out, int act_index) {
  ops_.push_back(std::make_unique<SelectOp>(buffer(in), buffer(out), act(act_index)));
}

void Model::layer_norm(int in, int weight, int bias, float eps, int out, int act_index) {
  const Rows rows = buffers_.at(size_t(in)).rows;
  ops_.push_back(std::make_unique<LayerNormOp>(
      rows, buffer(in), vector(weight), vector(bias), eps, buffer(out), act(act_index)));
}

void Model::norm(int in, int weight, float eps, int out, int residual, int act_index) {
  const Rows rows = buffers_.at(size_t(in)).rows;
  ops_.push_back(std::make_unique<NormOp>(
      rows, buffer(in), vector(weight), eps, buffer(out), buffer(residual), act(act_index)));
}

void Model::add(int a, int b, int out) {
  ops_.push_back(
      std::make_unique<AddOp>(buffers_.at(size_t(out)).rows, buffer(a), buffer(b), buffer(out)));
}

void Model::softcap(int b, float cap) {
  ops_.push_back(std::make_unique<SoftcapOp>(buffers_.at(size_t(b)).rows, buffer(b), cap));
}

void Model::emit(int in, int source, int order, int width, int act_index) {
  const int32_t* by = order < 0 ? nullptr : orders_.at(size_t(order));
  ops_.push_back(std::make_unique<EmitOp>(
      acts_.at(size_t(act_index)).rows, buffer(in), act(source), by, width, act(act_index)));
}

void Model::linear(int act_index, const std::vector<Part>& parts, int residual) {
  std::vector<LinearPart> p;
  if (context_.low_rank && acts_.at(size_t(act_index)).rows == Rows::tokens) {
    if (parts.size() > ADAPTED_PARTS)
      throw std::invalid_argument("too many matrices share an input");
    std::vector<int> ids;
    for (const Part& x : parts) ids.push_back(x.matrix);
    ops_.push_back(std::make_unique<LowRankOp>(act(act_index), ids));
  }
  for (const Part& x : parts)
    p.push_back({matrix(x.matrix), buffer(x.out), vector(x.bias), buffer(residual).data});
  ops_.push_back(
      std::make_unique<LinearOp>(acts_.at(size_t(act_index)).rows, act(act_index), std::move(p)));
}

void Model::gated(int in, const Part& gate, const Part& up, int kind, int mid, int act_index) {
  const RowAct& source = acts_.at(size_t(in));
  if (context_.low_rank && source.rows == Rows::tokens)
    ops_.push_back(
        std::make_unique<LowRankOp>(source.input, std::vector<int>{gate.matrix, up.matrix}));
  auto part = [&](const Part& p) {
    return p.matrix < 0 ? LinearPart{}
                        : LinearPart{matrix(p.matrix), Buffer{}, vector(p.bias), nullptr};
  };
  ops_.push_back(std::make_unique<GatedOp>(
      source.rows, source.input, part(gate), part(up), kind, buffer(mid), act(act_index)));
}

void Model::glu(int gate, int up, int kind, int act_index) {
  ops_.push_back(std::make_unique<GluOp>(
      buffers_.at(size_t(gate)).rows, buffer(gate), buffer(up), kind, act(act_index)));
}

void Model::attention(const Attention& a) {
  AttentionSpec s{buffer(a.q), buffer(a.k), buffer(a.v), a.layer, a.heads, a.kv_heads, a.head_dim,
      a.schedule, a.scale, vector(a.q_norm), vector(a.k_norm), a.eps,
      a.rope < 0 ? Rotation{} : ropes_.at(size_t(a.rope)), a.interleaved, a.softcap,
      vector(a.sinks), a.remainder, act(a.act)};
  attended_.push_back({a.layer, a.heads, a.kv_heads, a.head_dim});
  ops_.push_back(std::make_unique<AttentionOp>(s));
}

void Model::route(int in, int out, int top, bool normalize) {
  ops_.push_back(std::make_unique<RouteOp>(buffer(in), buffer(out), top, normalize));
}

int Model::add_expert_rows(int experts, int top, int hidden, int ffn, ActForms in, ActForms mid) {
  expert_rows_.push_back(
      allocate_expert_rows(*buffers_arena_, limits_.tokens, experts, top, hidden, ffn, in, mid));
  return int(expert_rows_.size()) - 1;
}

void Model::experts(int x, int routes, const std::vector<ExpertParts>& parts, int kind, int rows,
    int out, int residual) {
  std::vector<Expert> e;
  auto part = [&](int matrix, int bias) {
    return Expert::Part{this->matrix(matrix), vector(bias)};
  };
  for (const ExpertParts& p : parts)
    e.push_back({part(p.gate, p.gate_bias), part(p.up, p.up_bias), part(p.down, p.down_bias)});
  ops_.push_back(std::make_unique<ExpertsOp>(buffer(x), buffer(routes), std::move(e), kind,
      *expert_rows_.at(size_t(rows)), buffer(out), buffer(residual)));
}

void Model::output(int b, int width, bool last) {
  output_ = b;
  context_.head = logits().data;
  width_ = width;
  last_ = last;
  if (last) {
    const LinearOp& head = static_cast<LinearOp&>(*ops_.back());
    greedy_head_ = GreedyHead::of(
        *kernels_, head.part(0), head.act(), limits_.selected, threads(), *buffers_arena_);
  }
  size_t scratch = greedy_head_ ? GreedyHead::scratch_floats(limits_.selected) : 0;
  for (const auto& op : ops_)
    scratch = std::max(scratch, op->scratch_floats(std::max(limits_.tokens, limits_.selected)));
  for (float*& s : context_.scratch)
    s = buffers_arena_->allocate<float>(row_stride(int(scratch)) + 2 * SLACK);
  for (uint8_t*& r : context_.rooms) r = buffers_arena_->allocate<uint8_t>(room_);
  context_.statistics_stride = Logits::statistics_floats(width);
  if (buffers_[size_t(b)].rows == Rows::selected)
    context_.statistics =
        buffers_arena_->allocate<float>(size_t(limits_.selected) * context_.statistics_stride);
}

}  // namespace octavo
