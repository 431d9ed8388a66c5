// Attention over the cache, with the rotation of its queries and keys.
#pragma once
#include "ops.h"

namespace octavo {

struct Rotation {  // of the step's tokens: a row of `half` cosines and as many sines each
  float* table;
  int half;
  float* row(int t) const { return table + size_t(t) * 2 * size_t(half); }
};

// Cosines and sines of the step's positions, shared by all layers with these frequencies. axes: the
// coordinate that turns each pair where a step gives coordinates; none: the position.
class RopeTableOp : public Op {
 public:
  RopeTableOp(const float* frequencies, float factor, std::vector<int32_t> axes, Rotation out)
      : frequencies_(frequencies), factor_(factor), axes_(std::move(axes)), out_(out) {}
  std::string name(int) const override { return "rope table"; }
  void run(Context& c, int phase, int thread, Work& work) override;
 private:
  const float* frequencies_; float factor_; std::vector<int32_t> axes_; Rotation out_;
};

struct AttentionSpec {
  Buffer q, k, v;
  int layer, heads, kv_heads, head_dim, schedule;
  float scale;
  const float *q_norm, *k_norm;  // null: none
  float eps;
  Rotation rope;                 // without a table: none
  int interleaved;
  float softcap;                 // 0: none
  const float* sinks;            // one a head, or null
  bool remainder;                // as in AttendArgs
  Input act;
};

// Phase 0 writes keys and values into the cache, 1 attends, 2 merges partials. Where every sequence
// has one new token, and all attend, who attends to its newest keys writes them first, and phase 0
// has nothing to do.
class AttentionOp : public Op {
 public:
  explicit AttentionOp(const AttentionSpec& s) : s_(s) {}
  std::string name(int phase) const override {
    return phase == 0 ? "attention: store" : phase == 1 ? "attention" : "attention: merge";
  }
  int phases() const override { return 3; }
  Cost cost(const Context& c, int phase) const override;
  // Partial outputs and queries of an item, and a head before and after rotation; or a row of all
  // heads.
  size_t scratch_floats(int) const override {
    return std::max(
        (2 * ATTEND_ROWS + 2) * align_up(size_t(s_.head_dim), 16) + SLACK, size_t(s_.act.shared.k));
  }
  void run(Context& c, int phase, int thread, Work& work) override;
 private:
  const float* turned(
      const Context& c, Buffer from, const float* norm, int t, int head, float* tmp) const;
  const KvLayer& cache(const Context& c) const { return c.kv.layers[size_t(s_.layer)]; }
  void store(Context& c, const KvWrite& write, int kv_head, float* tmp) const;
  bool stores_first(const Context& c) const;
  KeyRange keys(const Context& c, int index) const;
  void attend(Context& c, int index, int units, float* tmp);
  void merge(Context& c, int t, const Act& act, int out, float* row);
  AttentionSpec s_;
};

// Plans the attention work of the step for the layers of a schedule.
void plan_attention(const Context& c, Schedule& schedule);

}  // namespace octavo
