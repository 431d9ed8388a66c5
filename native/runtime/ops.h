// The recorded forward pass: a list of operations over token rows. Each runs in one or more phases;
// a phase is one call of Work::each, which all threads leave together, and no phase reads what
// another thread writes in it.
#pragma once
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "../kernels/api.h"
#include "act.h"
#include "adapter.h"
#include "matrix.h"
#include "memory.h"
#include "pool.h"
#include "trace.h"

namespace octavo {

enum class Rows { tokens, selected };

constexpr int SLACK = 16;  // floats past a row's end that kernels may read

struct Buffer {  // float values, one row per token
  float* data;
  int width, stride;
  float* row(int i) const { return data + size_t(i) * size_t(stride); }
};

// Floats from row to row: an odd number of cache lines, so that a column of rows spreads over all
// sets of the first cache.
inline size_t row_stride(int width) { return align_up(size_t(width), 64) + PANEL; }

struct Span {  // consecutive tokens of one sequence within the step
  int first, count;   // rows [first, first + count)
  int position;       // position of the first
  int table;          // offset of its block table in `block_tables`
  int adapter;        // slot, or -1
};

// a row whose keys and values are stored in a further sequence, of another branch of its tree
struct KvWrite {
  int row, table;  // offset of the block table in `block_tables`
  int position;    // the row's
};

// rows see no more than the first `keys`
struct AttendItem { int span, row, rows, keys, chunk_begin, chunk_end, part; };

// attention work of a step; the same for every layer with this window, direction, group and rows
struct Schedule {
  int window;
  // else tokens see to both sides, and the span holds its sequence from the first token on
  bool causal;
  int group;    // query heads that share a KV head
  bool segmented;  // tokens see their segment alone
  bool selected;   // attention of rows that are selected alone
  bool partial = false;  // in this step some are not
  std::vector<AttendItem> items;
  std::vector<int> part_begin;  // per token, index of its first partial; one more at the end
};

// Bytes of one KV head in a block: keys and values of 16 tokens, for int8 with their scales.
inline size_t kv_head_bytes(KvType type, int padded) {
  const size_t values = size_t(2) * BLOCK * size_t(padded);
  return type == KV_F32 ? 4 * values
      : type == KV_BF16 ? 2 * values
                        : values + size_t(2 * BLOCK * kv_groups(padded)) * sizeof(uint16_t);
}

struct KvShape { int heads, head_dim; };  // of a layer; without heads it keeps nothing

// Bytes of one block of a layer.
inline size_t kv_block_bytes(KvType type, KvShape s) {
  return size_t(s.heads) * kv_head_bytes(type, int(align_up(size_t(s.head_dim), 16)));
}

struct KvLayer {
  KvShape shape;
  int padded;         // head_dim, to whole vectors
  size_t head_bytes;
  size_t begin;       // of this layer in a block
};

// A block has the keys and values of 16 tokens in all layers, so that few tokens are few pages.
struct KvCache {
  std::vector<KvLayer> layers;
  int blocks = 0;
  KvType type = KV_BF16;
  size_t block_bytes = 0;
  uint8_t* data = nullptr;
  uint8_t* block(int i) const { return data + size_t(i) * block_bytes; }
  uint8_t* at(const KvLayer& l, int i, int head) const {
    return block(i) + l.begin + size_t(head) * l.head_bytes;
  }
};

struct Step {  // what changes from step to step
  int tokens = 0, selected = 0, blocks = 0;  // blocks: entries of `block_tables`
  const int32_t *ids = nullptr, *positions = nullptr, *logits_indices = nullptr,
                *block_tables = nullptr, *token_type_ids = nullptr;  // the last null: all 0
  bool all_logits = true;          // they will be read, also those that no sample needs
  std::vector<Span> spans;         // one after the other, of all rows
  // Rows that replace those of the table: `embedded` of them, for tokens in ascending order.
  const float* embeddings = nullptr;
  const int32_t* embedding_rows = nullptr;
  int embedded = 0, embedding_width = 0;
  std::vector<KvWrite> kv_writes;
  const int32_t* reach = nullptr;  // later tokens of its span that each row sees too; null: none
  // [axes][tokens], for rotations along several axes; null: the positions
  const int32_t* coordinates = nullptr;
  int axes = 0;
  const int32_t* segments = nullptr;  // of each row, ascending within a span; null: none
  int first_op = 0, last_op = 1 << 30;  // the operations to run
  bool brief = false;                   // without those that the model skips
  const float* embedding(int t) const {  // given for row t, or null
    const int32_t *end = embedding_rows + embedded,
                  *found = std::lower_bound(embedding_rows, end, t);
    return found < end && *found == t
        ? embeddings + size_t(found - embedding_rows) * size_t(embedding_width)
        : nullptr;
  }
  int rows(Rows r) const { return r == Rows::tokens ? tokens : selected; }
};

class GreedyHead;

struct Context {
  const Kernels* kernels;
  Step step;
  KvCache kv;
  std::vector<Schedule> schedules;
  std::vector<float*> scratch;  // per thread, what the operation that needs most needs
  std::vector<uint8_t*> rooms;  // per thread, for panels of matrices that are not packed
  // of rows in a step with segments: the first and the last row of their segment in the span
  std::vector<int> segment_first, segment_last;
  float *part_max = nullptr, *part_sum = nullptr, *part_out = nullptr;  // attention partials
  int part_capacity = 0;                                                // in (token, chunk) pairs
  const float* head = nullptr;  // the logits
  float* statistics = nullptr;  // of their sets, row after row (logits.h)
  size_t statistics_stride = 0;
  bool measured = false;        // whether the head finds them in this step,
  std::vector<float> inverses;  // with this inverse temperature for each row
  float* statistics_of(int row) const { return statistics + size_t(row) * statistics_stride; }
  size_t expert_bytes = 0;      // weights of experts read since loading
  std::vector<AdapterRun> runs; // rows of the step that have an adapter
  // [part][token][MAX_RANK] A x of the next linear layer; null: no adapters here
  float* low_rank = nullptr;
  int low_rank_tokens = 0;
  bool reads_bf16 = false, reads_f32 = false;  // whether adapters of the step do
  Act wanted(Act a) const {
    if (a.adapted_bf16 && !reads_bf16) a.bf16 = nullptr;
    if (a.adapted_f32 && !reads_f32) a.f32 = nullptr;
    return a;
  }
  float* projected(int part, int token) const {
    return low_rank + (size_t(part) * size_t(low_rank_tokens) + size_t(token)) * MAX_RANK;
  }
  // of steps that want the largest logit of each row and nothing else; null: any other
  GreedyHead* greedy_head = nullptr;
  // by panel of the head: whether a token in it may be drawn; empty: compute all
  std::vector<uint8_t> live;
};

// Rows of `in` that this thread computes: all where inputs are apart, else its share, which all
// threads leave together. Scales and sums of a tile's rows share lines of the cache, so tiles are
// not divided where that leaves few threads without any.
template <class F> void each_row(const Input& in, int rows, int thread, Work& work, F&& f) {
  if (in.apart(rows)) return f(0, rows);
  const int size = 2 * rows > ROW_TILE * work.members() ? ROW_TILE : 1;
  work.each(thread, (rows + size - 1) / size, 1,
      [&](int begin, int end) { f(begin * size, std::min(end * size, rows)); });
}

class Op {
 public:
  virtual ~Op() = default;
  virtual std::string name(int phase) const = 0;  // for the profile
  int profiled = -1;  // the profile's number of its first phase, once it has run
  virtual int phases() const { return 1; }
  // of each thread, for steps of so many rows
  virtual size_t scratch_floats(int /*rows*/) const { return 0; }
  virtual bool idle(const Context&) const { return false; }  // nothing to do in this step
  virtual Cost cost(const Context&, int /*phase*/) const { return {}; }  // of one that has run
  // asks for the weights that this thread will read first
  virtual void fetch(int /*thread*/, const Work&) const {}
  virtual void run(Context& c, int phase, int thread, Work& work) = 0;
};

enum class Index { ids, positions, token_type_ids };

// table[index + offset] * scale; or, if replaceable or without a table, the row that the step gives
class EmbedOp : public Op {
 public:
  EmbedOp(const Matrix* table, Buffer out, float scale, Index index, int offset, bool replaceable)
      : table_(table), out_(out), scale_(scale), index_(index), offset_(offset),
        replaceable_(replaceable) {}
  std::string name(int) const override { return "embed"; }
  void run(Context& c, int phase, int thread, Work& work) override;
 private:
  const Matrix* table_; Buffer out_; float scale_; Index index_; int offset_; bool replaceable_;
};

// out = in, plus columns of the row that the step gives for the token, if it does
class InjectOp : public Op {
 public:
  InjectOp(Buffer in, Buffer out, int first) : in_(in), out_(out), first_(first) {}
  std::string name(int) const override { return "inject"; }
  bool idle(const Context& c) const override { return in_.data == out_.data && !c.step.embedded; }
  void run(Context& c, int phase, int thread, Work& work) override;
 private:
  Buffer in_, out_; int first_;
};

// out = in[logits_indices]; to `act` as well for linear layers
class SelectOp : public Op {
 public:
  SelectOp(Buffer in, Buffer out, Input act) : in_(in), out_(out), act_(act) {}
  std::string name(int) const override { return "select_rows"; }
  void run(Context& c, int phase, int thread, Work& work) override;
 private:
  Buffer in_, out_; Input act_;
};

// y = (in - mean) / sqrt(variance + eps) * weight + bias; to `out`, and to `act` for linear layers.
class LayerNormOp : public Op {
 public:
  LayerNormOp(Rows rows, Buffer in, const float* weight, const float* bias, float eps, Buffer out,
      Input act)
      : rows_(rows),
        in_(in),
        weight_(weight),
        bias_(bias),
        eps_(eps),
        out_(out),
        act_(act) {}
  std::string name(int) const override { return "norm"; }
  void run(Context& c, int phase, int thread, Work& work) override;
 private:
  Rows rows_; Buffer in_; const float *weight_, *bias_; float eps_; Buffer out_; Input act_;
};

// y = rms_norm(in) * weight; to `act` for linear layers, or to `out`, optionally onto a residual.
class NormOp : public Op {
 public:
  NormOp(
      Rows rows, Buffer in, const float* weight, float eps, Buffer out, Buffer residual, Input act)
      : rows_(rows),
        in_(in),
        weight_(weight),
        eps_(eps),
        out_(out),
        residual_(residual),
        act_(act) {}
  std::string name(int) const override { return "norm"; }
  size_t scratch_floats(int) const override { return padded_cols(size_t(in_.width)); }
  void run(Context& c, int phase, int thread, Work& work) override;
 private:
  Rows rows_; Buffer in_; const float* weight_; float eps_; Buffer out_, residual_; Input act_;
};

// out = a + b
class AddOp : public Op {
 public:
  AddOp(Rows rows, Buffer a, Buffer b, Buffer out) : rows_(rows), a_(a), b_(b), out_(out) {}
  std::string name(int) const override { return "add"; }
  void run(Context& c, int phase, int thread, Work& work) override;
 private:
  Rows rows_; Buffer a_, b_, out_;
};

// Panels a thread takes at a time: 32 KiB of weights, in whole pairs.
inline int linear_chunk(size_t panel_bytes) { return int((16 << 10) / panel_bytes) * 2 + 2; }

struct LinearPart { const Matrix* weight; Buffer out; const float* bias; const float* residual; };

// The first half of adapters: A x for every matrix that reads this input.
class LowRankOp : public Op {
 public:
  LowRankOp(Input act, std::vector<int> matrices) : act_(act), matrices_(std::move(matrices)) {}
  std::string name(int) const override { return "adapters"; }
  bool idle(const Context& c) const override { return c.runs.empty(); }
  void run(Context& c, int phase, int thread, Work& work) override;
 private:
  Input act_; std::vector<int> matrices_;
};

// Several matrices applied to the same input, divided among threads by panels.
class LinearOp : public Op {
 public:
  LinearOp(Rows rows, Input act, std::vector<LinearPart> parts)
      : rows_(rows),
        act_(act),
        parts_(std::move(parts)) {}
  const LinearPart& part(int i) const { return parts_[size_t(i)]; }
  const Act& act() const { return act_.shared; }
  void fetch(int thread, const Work& work) const override;
  std::string name(int) const override;  // "linear IN->OUT"
  Cost cost(const Context& c, int phase) const override;
  void run(Context& c, int phase, int thread, Work& work) override;
 private:
  void run_head(Context& c, int rows, const Act& act, int thread, Work& work) const;
  Rows rows_; Input act_; std::vector<LinearPart> parts_;
};

// Gate and up projections with what follows them, two panels at a time: what lies between never
// leaves the core. Without an up projection the gate is multiplied by one. Phase 0 leaves values in
// `mid`, 1 emits them.
class GatedOp : public Op {
 public:
  GatedOp(Rows rows, Input in, LinearPart gate, LinearPart up, int kind, Buffer mid, Input out)
      : rows_(rows), in_(in), out_(out), gate_(gate), up_(up), kind_(kind), mid_(mid) {}
  void fetch(int thread, const Work& work) const override;
  std::string name(int phase) const override {
    return phase
        ? "gated: emit"
        : "gated " + std::to_string(gate_.weight->cols) + "->" + std::to_string(gate_.weight->rows);
  }
  int phases() const override { return 2; }
  Cost cost(const Context& c, int phase) const override;
  size_t scratch_floats(int rows) const override { return size_t(rows) * WIDTH; }
  void run(Context& c, int phase, int thread, Work& work) override;
  static constexpr int PAIR = 2 * PANEL, WIDTH = 2 * PAIR;  // scratch floats a row: gates, then ups
 private:
  void project(Context& c, int rows, int thread, Work& work) const;
  Rows rows_; Input in_, out_; LinearPart gate_, up_; int kind_; Buffer mid_;
};

// Gates and ups that lie in buffers of one width, for linear layers.
class GluOp : public Op {
 public:
  GluOp(Rows rows, Buffer gate, Buffer up, int kind, Input out)
      : rows_(rows),
        gate_(gate),
        up_(up),
        kind_(kind),
        out_(out) {}
  std::string name(int) const override { return "glu"; }
  size_t scratch_floats(int) const override { return size_t(out_.shared.k); }
  void run(Context& c, int phase, int thread, Work& work) override;
 private:
  Rows rows_; Buffer gate_, up_; int kind_; Input out_;
};

// x = cap * tanh(x / cap), in place
class SoftcapOp : public Op {
 public:
  SoftcapOp(Rows rows, Buffer x, float cap) : rows_(rows), x_(x), cap_(cap) {}
  std::string name(int) const override { return "softcap"; }
  void run(Context& c, int phase, int thread, Work& work) override;
 private:
  Rows rows_; Buffer x_; float cap_;
};

// Rows as input of linear layers, in the given order of features or as they are; from a buffer or
// from another input.
class EmitOp : public Op {
 public:
  EmitOp(Rows rows, Buffer in, Input source, const int32_t* order, int width, Input act)
      : rows_(rows), in_(in), source_(source), order_(order), width_(width), act_(act) {}
  std::string name(int) const override { return "emit"; }
  size_t scratch_floats(int) const override { return size_t(act_.shared.k); }
  void run(Context& c, int phase, int thread, Work& work) override;
 private:
  Rows rows_; Buffer in_; Input source_; const int32_t* order_; int width_; Input act_;
};

}  // namespace octavo
