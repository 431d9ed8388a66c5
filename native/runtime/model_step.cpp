// Steps: what comes is checked, then the recorded operations run.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "logits.h"
#include "model.h"

namespace octavo {
void Model::check(const Step& s) const {
  if (s.tokens < 1 || s.tokens > limits_.tokens || s.selected > limits_.selected)
    throw std::invalid_argument("step exceeds the limits of the model");
  const int32_t* given[] = {s.ids, s.positions, s.token_type_ids};
  for (int index = 0; index < 3; index++)
    for (int t = 0; given[index] && t < s.tokens; t++)
      if (given[index][t] < 0 || given[index][t] >= known_[index])
        throw std::invalid_argument("a token, position or type is outside its table");
  for (int i = 0; i < s.selected; i++)
    if (s.logits_indices[i] < 0 || s.logits_indices[i] >= s.tokens)
      throw std::invalid_argument("a selected row is outside the step");
  check_spans(s);
  if (s.brief && skipped_.size() != ops_.size())
    throw std::invalid_argument("nothing is said of what a brief step skips");
  if (s.reach) check_reach(s);
  if (s.coordinates && s.axes < axes_)
    throw std::invalid_argument("coordinates are missing an axis of the model's rotations");
  if (s.embedded) check_embeddings(s);
  if (all_embedded_ && s.embedded != s.tokens)
    throw std::invalid_argument("this model takes embeddings of every row");
}

void Model::check_spans(const Step& s) const {
  int next = 0;
  for (const Span& x : s.spans) {
    const bool rows = x.first == next && x.count >= 1 && x.count <= s.tokens - x.first &&
        x.position >= 0 && x.table >= 0;
    const int64_t blocks = rows ? (int64_t(x.position) + x.count + BLOCK - 1) / BLOCK : 0;
    if (!rows || blocks > s.blocks - x.table)
      throw std::invalid_argument("a span is outside the step");
    for (int64_t b = 0; b < blocks; b++)
      if (s.block_tables[x.table + b] < 0 || s.block_tables[x.table + b] >= context_.kv.blocks)
        throw std::invalid_argument("no such KV block");
    next += x.count;
  }
  if (next != s.tokens) throw std::invalid_argument("rows of the step are in no span");
}

// Rows see ever further, so that the last of several sees the most.
void Model::check_reach(const Step& s) const {
  for (const Span& x : s.spans)
    for (int t = 0, seen = 0; t < x.count; t++) {
      const int reach = s.reach[x.first + t];
      if (reach < 0 || reach >= x.count - t || t + reach < seen)
        throw std::invalid_argument("a row sees beyond its span, or less than the row before");
      seen = t + reach;
    }
}

void Model::check_embeddings(const Step& s) const {
  if (s.embedding_width != embedding_width_)
    throw std::invalid_argument("the model takes no embeddings of this width");
  for (int i = 0; i < s.embedded; i++)
    if (s.embedding_rows[i] >= s.tokens ||
        s.embedding_rows[i] < (i ? s.embedding_rows[i - 1] + 1 : 0))
      throw std::invalid_argument("embeddings are for rows of the step, in ascending order");
  // A part of a step is given what its first part was.
  for (size_t i = 0; !s.first_op && i < size_t(s.embedded) * size_t(s.embedding_width); i++)
    if (!std::isfinite(s.embeddings[i]))
      throw std::invalid_argument("embeddings are finite numbers");
}

// At the positions of their rows.
void Model::place_kv_writes(Step& s) const {
  for (KvWrite& w : s.kv_writes) {
    if (w.row < 0 || w.row >= s.tokens || w.table < 0)
      throw std::invalid_argument("a KV write is outside the step");
    const auto span = std::find_if(
        s.spans.begin(), s.spans.end(), [&](const Span& x) { return w.row < x.first + x.count; });
    w.position = span->position + w.row - span->first;
    if (w.position / BLOCK >= s.blocks - w.table)
      throw std::invalid_argument("a KV write is outside the step");
    const int32_t block = s.block_tables[w.table + w.position / BLOCK];
    if (block < 0 || block >= context_.kv.blocks) throw std::invalid_argument("no such KV block");
  }
}

// Rows of a span that have the same number.
void Model::place_segments() {
  const Step& s = context_.step;
  const bool wanted = std::any_of(context_.schedules.begin(), context_.schedules.end(),
      [](const Schedule& x) { return x.segmented; });
  if (!wanted) return;
  if (!s.segments) throw std::invalid_argument("this model takes the segment of every row");
  context_.segment_first.resize(size_t(s.tokens));
  context_.segment_last.resize(size_t(s.tokens));
  for (const Span& x : s.spans)
    for (int t = 0, end; t < x.count; t = end) {
      const int32_t* number = s.segments + x.first;
      for (end = t + 1; end < x.count && number[end] == number[t];) end++;
      if (end < x.count && number[end] < number[t])
        throw std::invalid_argument("segments ascend within a span");
      std::fill_n(context_.segment_first.begin() + x.first + t, end - t, t);
      std::fill_n(context_.segment_last.begin() + x.first + t, end - t, end - 1);
    }
}

void Model::plan_head(const std::vector<SamplingRow>& sampling) {
  plan_live(sampling);
  context_.inverses.assign(size_t(context_.step.selected), 0);
  for (size_t i = 0; i < sampling.size(); i++)
    context_.inverses[i] = summed_inverse(sampling[i], width_);
  const bool greedy = greedy_head_ && greedy_head_->ready() && !sampling.empty() &&
      !context_.step.all_logits && std::all_of(sampling.begin(), sampling.end(), wants_argmax);
  if (greedy) greedy_head_->begin(context_.step.selected);
  context_.greedy_head = greedy ? greedy_head_.get() : nullptr;
  context_.measured = last_ && context_.live.empty() && !greedy;
}

// Panels of the head without a token that may be drawn need not be computed, unless
// log-probabilities sum over them.
void Model::plan_live(const std::vector<SamplingRow>& sampling) {
  context_.live.clear();
  if (context_.step.all_logits) return;
  for (const SamplingRow& r : sampling) if (!r.mask || r.logprobs >= 0) return;
  context_.live.assign(size_t(width_ + PANEL - 1) / PANEL, 0);
  for (size_t p = 0; p < context_.live.size(); p++)
    for (const SamplingRow& r : sampling)
      context_.live[p] |= uint16_t(r.mask[p / 2] >> (p % 2 * PANEL)) != 0;
}

void Model::plan_adapters() {
  context_.runs.clear();
  for (const Span& s : context_.step.spans)
    if (s.adapter >= 0) {
      if (!adapters_.at(size_t(s.adapter))) throw std::invalid_argument("no such adapter");
      context_.runs.push_back({adapters_[size_t(s.adapter)].get(), s.first, s.count});
    }
  context_.reads_bf16 = context_.reads_f32 = false;
  for (const AdapterRun& run : context_.runs)
    context_.reads_bf16 |= run.adapter->reads(BF16), context_.reads_f32 |= run.adapter->reads(F32);
}

void Model::plan_operations() {
  const Step& step = context_.step;
  planned_.clear();
  if (step.first_op == 0)
    for (const auto& op : prologue_) planned_.push_back(op.get());
  const size_t last = std::min(size_t(step.last_op), ops_.size());
  for (size_t i = size_t(step.first_op); i < last; i++)
    if (!step.brief || !skipped_[i]) planned_.push_back(ops_[i].get());
  for (Op* op : planned_) {
    if (op->profiled >= 0) continue;
    op->profiled = profile_.add(op->name(0));
    for (int p = 1; p < op->phases(); p++) profile_.add(op->name(p));
  }
}

void Model::plan(const Step& step, const std::vector<SamplingRow>& sampling) {
  check(step);
  context_.step = step;
  place_kv_writes(context_.step);
  place_segments();
  plan_head(sampling);
  plan_adapters();
  plan_operations();
  for (Schedule& s : context_.schedules) plan_attention(context_, s);
}

void Model::run(Op& op, int thread, Work& work) {
  if (thread == 0) operations_.fetch_add(1, std::memory_order_relaxed);
  for (int p = 0; p < op.phases(); p++) {
    const bool idle = op.idle(context_);
    if (!idle) op.run(context_, p, thread, work);
    if (trace_ && !idle)
      trace_->mark(thread, &op, p, work.done(thread), thread ? Cost{} : op.cost(context_, p));
    if (thread == 0) profile_.mark(op.profiled + p);
  }
}

std::vector<Sample> Model::step(const Step& step, const std::vector<SamplingRow>& sampling) {
  if (!buffers_arena_->writable()) throw std::logic_error("a model that only counts cannot be run");
  Trace* trace = trace_.get();
  if (trace) trace->begin(0);
  plan(step, sampling);
  std::vector<Sample> samples(sampling.size());
  profile_.begin();
  if (trace) trace->mark(0, nullptr, Trace::PLAN, 0, {});
  team_->run([&](int thread, Work& work) {
    work.set_timed(thread, trace);
    if (trace && thread) trace->begin(thread);
    if (trace && !thread) trace->mark(0, nullptr, Trace::WAKE, 0, {});
    for (size_t i = 0; i < planned_.size(); i++) {
      // so that memory is busy where this one is not
      if (i + 1 < planned_.size()) planned_[i + 1]->fetch(thread, work);
      run(*planned_[i], thread, work);
    }
    work.each(thread, int(sampling.size()), 1, [&](int begin, int end) {
      for (int i = begin; i < end; i++) samples[size_t(i)] = draw(i, sampling[size_t(i)]);
    });
    if (trace) trace->mark(thread, nullptr, Trace::SAMPLE, work.done(thread), {});
  });
  if (trace) trace->mark(0, nullptr, Trace::JOIN, 0, {});
  profile_.mark(sampling_phase_);
  profile_.end();
  return samples;
}

Sample Model::draw(int row, const SamplingRow& sampling) const {
  const GreedyHead* greedy = context_.greedy_head;
  const int32_t token = greedy ? greedy->token(row) : NO_TOKEN;
  if (token != NO_TOKEN) return {token, 0, {}, {}};
  return sample(*kernels_, logits().row(row), context_.statistics_of(row), context_.measured,
      width_, sampling);
}

void Model::skip(const std::vector<int>& ops) {
  std::vector<uint8_t> skipped(ops_.size(), 0);
  for (int op : ops) skipped.at(size_t(op)) = 1;
  skipped_ = std::move(skipped);
}

std::vector<std::vector<Sample>> Model::decode(Step step, std::vector<SamplingRow> sampling,
    int steps, const std::vector<std::vector<int32_t>>& ends) {
  const size_t n = size_t(step.tokens);
  if (step.spans.size() != n || sampling.size() != n || ends.size() != n ||
      step.selected != step.tokens || step.embedded || !step.kv_writes.empty() || step.reach ||
      step.coordinates || step.segments)
    throw std::invalid_argument("only single tokens that are all sampled can be decoded in a row");
  std::vector<int32_t> ids(step.ids, step.ids + n), positions(step.positions, step.positions + n);
  step.ids = ids.data(), step.positions = positions.data();
  std::vector<std::vector<Sample>> out;
  for (bool ended = false; !ended && int(out.size()) < steps;) {
    out.push_back(this->step(step, sampling));
    for (size_t i = 0; i < n; i++) {
      const int32_t token = out.back()[i].token;
      ended |=
          token == NO_TOKEN || std::find(ends[i].begin(), ends[i].end(), token) != ends[i].end();
      ids[i] = token;
      positions[i]++, step.spans[i].position++, sampling[i].position++;
    }
  }
  return out;
}

}  // namespace octavo
