// A recorded program made executable: buffers, packed weights, KV cache, and one call per step.
#pragma once
#include <atomic>
#include <climits>
#include <memory>
#include <string>
#include <vector>

#include "act.h"
#include "attention.h"
#include "experts.h"
#include "greedy_head.h"
#include "profile.h"
#include "sampling.h"
#include "trace.h"

namespace octavo {

struct Limits {
  int tokens;     // most tokens in a step
  int selected;   // most rows that need logits
};

class Model {
 public:
  // Counts what recording a program takes: it starts no threads, takes no memory, reads no weights
  // and cannot be run.
  Model(const std::string& isa, int threads, Limits limits);
  // Has as much memory as such a model has counted. beside: a model that never runs at the same
  // time, whose threads are used; or null.
  Model(const std::string& isa, int threads, Limits limits, size_t weight_bytes,
      size_t buffer_bytes, const Model* beside = nullptr);

  // Takes packed weights from a file that save_weights wrote, before anything is recorded; what is
  // added then only says where it lies. False if there is no such file of `bytes`, or what it holds
  // has changed.
  bool map_weights(const char* path, size_t bytes);
  bool save_weights(const char* path) {
    return weights_->save(path, sum(weights_->data(), weights_->used()));
  }

  // Whether weights are to be given when they are added: else a file has them, or they are only
  // counted.
  bool needs_weights() const { return weights_->writable(); }

  // Recording. Indices name what was added; -1 stands for absent.
  int add_matrix(Storage storage, const uint8_t* data, size_t data_bytes, size_t rows, size_t cols);
  // One that steps can use as it is stored until `pack` has come to it; `data`, in a mapped file,
  // must stay.
  int add_stored(Storage storage, const uint8_t* data, size_t data_bytes, size_t rows, size_t cols);
  void read_stored();        // brings those into memory, when all have been added
  // Packs about so much more of them, then reads packed weights for what the head has to know of
  // them; whether any are left.
  bool pack(size_t bytes);
  int add_vector(const float* data, size_t n);  // padded with zeros to 16
  int add_buffer(Rows rows, int width);
  // apart: its producer can give each thread its own; what that reads must then stay until the
  // operation after it is done. adapted: forms that only adapters read.
  int add_act(
      Rows rows, int width, ActForms forms, bool apart, bool adapted_bf16, bool adapted_f32);
  int add_rope(const float* frequencies, int half, float factor, std::vector<int32_t> axes);
  int add_order(const int32_t* order, int n);
  int add_schedule(int window, bool causal, int group, bool segmented, bool selected);
  void embed(int matrix, int out, float scale, int index, int offset, bool replaceable);
  void select_rows(int in, int out, int act);
  void layer_norm(int in, int weight, int bias, float eps, int out, int act);
  void norm(int in, int weight, float eps, int out, int residual, int act);
  void add(int a, int b, int out);
  void softcap(int buffer, float cap);
  void inject(int in, int out, int first);
  // from a buffer, or from another act
  void emit(int buffer, int source, int order, int width, int act);
  struct Part { int matrix = -1, out = -1, bias = -1; };
  // which is added to every part
  void linear(int act, const std::vector<Part>& parts, int residual);
  void gated(int in, const Part& gate, const Part& up, int kind, int mid, int act);
  void glu(int gate, int up, int kind, int act);
  struct Attention {
    int q = -1, k = -1, v = -1, layer = 0, heads = 0, kv_heads = 0, head_dim = 0, schedule = -1,
        q_norm = -1, k_norm = -1, rope = -1;
    int sinks = -1, act = -1;
    float scale = 1, eps = 0, softcap = 0;
    bool interleaved = false, remainder = true;
  };
  void attention(const Attention& a);
  void route(int in, int out, int top, bool normalize);
  int add_expert_rows(int experts, int top, int hidden, int ffn, ActForms in, ActForms mid);
  struct ExpertParts {
    int gate = -1, up = -1, down = -1, gate_bias = -1, up_bias = -1, down_bias = -1;
  };
  void experts(int x, int routes, const std::vector<ExpertParts>& parts, int kind, int rows,
      int out, int residual);
  // last: written by a linear layer of selected rows that nothing follows
  void output(int buffer, int width, bool last);

  // Makes room for adapters; before anything is recorded.
  void allow_adapters();
  int add_adapter(const std::vector<Adapter::Part>& parts);  // gives a slot
  void remove_adapter(int slot);

  void allocate_cache(const std::vector<KvShape>& layers, int blocks, KvType type, int parts);
  // When less than half of `ahead` bytes of the cache past block `reached` are there, has the
  // system hand out all of them, about `bytes` a call; whether some of that is left.
  bool prefault_kv(int reached, size_t ahead, size_t bytes);
  void copy_block(int from, int to);

  // Runs every operation, then samples the selected rows.
  std::vector<Sample> step(const Step& step, const std::vector<SamplingRow>& sampling);

  // Up to `steps` steps, the tokens drawn in one being the input of the next: for spans of one
  // token that are all sampled. Stops after a step that draws, for some row, a token of its `ends`
  // or none.
  std::vector<std::vector<Sample>> decode(Step step, std::vector<SamplingRow> sampling, int steps,
      const std::vector<std::vector<int32_t>>& ends);
  size_t expert_bytes() const { return context_.expert_bytes; }
  const Profile& profile() const { return profile_; }
  // Records what threads do from now on, at most so many spans; or ends that. Between steps.
  void start_trace(size_t spans) { trace_ = std::make_unique<Trace>(threads(), spans); }
  std::unique_ptr<Trace> take_trace() { return std::move(trace_); }
  int length() const { return int(ops_.size()); }  // in operations
  void skip(const std::vector<int>& ops);  // in steps that are brief
  // Operations begun so far; may be read while a step runs, to see that it gets on.
  uint64_t operations() const { return operations_.load(std::memory_order_relaxed); }
  const Buffer& logits() const { return buffers_[size_t(output_)].buffer; }
  int width() const { return width_; }  // of the output: the vocabulary, where it is logits
  const Buffer& values(int buffer) const { return buffers_.at(size_t(buffer)).buffer; }
  // Of a buffer; 0 where this model only counts.
  int rows(int buffer) const {
    return buffers_arena_->writable() ? row_count(buffers_.at(size_t(buffer)).rows) : 0;
  }

  int threads() const { return int(context_.scratch.size()); }
  const char* isa() const { return kernels_->name; }
  // What recording has taken.
  size_t weight_bytes() const { return weights_->used(); }
  size_t buffer_bytes() const { return buffers_arena_->used(); }
  size_t cache_bytes() const { return cache_ ? cache_->used() : 0; }
  const Matrix* matrix(int i) const { return matrices_.at(size_t(i)).get(); }

  static size_t matrix_bytes(Storage storage, size_t rows, size_t cols);

 private:
  Model(const std::string& isa, std::shared_ptr<Team> team, int threads, Limits limits,
      std::unique_ptr<Arena> weights, std::unique_ptr<Arena> buffers);
  struct Row { Rows rows; Buffer buffer; };
  struct RowAct { Rows rows; Input input; };
  int row_count(Rows r) const { return r == Rows::tokens ? limits_.tokens : limits_.selected; }
  Buffer buffer(int i) const { return i < 0 ? Buffer{} : buffers_.at(size_t(i)).buffer; }
  const float* vector(int i) const { return i < 0 ? nullptr : vectors_.at(size_t(i)); }
  Input act(int i) const { return i < 0 ? Input{} : acts_.at(size_t(i)).input; }
  uint64_t sum(const uint8_t* data, size_t bytes);  // of whole lines
  Matrix& new_matrix(Storage storage, size_t data_bytes, size_t rows, size_t cols);
  void check(const Step& step) const;
  void check_spans(const Step& step) const;
  void check_embeddings(const Step& step) const;
  void check_reach(const Step& step) const;
  void place_kv_writes(Step& step) const;
  void place_segments();
  void plan_head(const std::vector<SamplingRow>& sampling);
  void plan_live(const std::vector<SamplingRow>& sampling);
  void plan_adapters();
  void plan_operations();
  void plan(const Step& step, const std::vector<SamplingRow>& sampling);  // all that ops may read
  void run(Op& op, int thread, Work& work);
  Sample draw(int row, const SamplingRow& sampling) const;

  const Kernels* kernels_;
  std::shared_ptr<Team> team_;
  Limits limits_;
  std::unique_ptr<Arena> weights_;
  std::unique_ptr<Arena> buffers_arena_;
  std::unique_ptr<Arena> cache_;
  std::vector<std::unique_ptr<Matrix>> matrices_;
  size_t stored_ = 0;  // before this one, all are packed
  size_t room_ = 0;    // bytes for panels of those that are not, of each thread
  int prefaulted_ = 0, claiming_ = 0;  // KV blocks whose memory is there, and is to be
  std::vector<const float*> vectors_;
  std::vector<Row> buffers_;
  std::vector<RowAct> acts_;
  std::vector<Rotation> ropes_;
  std::vector<const int32_t*> orders_;
  std::vector<std::unique_ptr<Op>> ops_;
  std::vector<std::unique_ptr<Op>> prologue_;
  std::vector<uint8_t> skipped_;  // by operation, in brief steps
  std::vector<Op*> planned_;      // the operations of a step
  Context context_;
  Profile profile_;
  const int sampling_phase_ = profile_.add("sample");
  std::unique_ptr<Trace> trace_;  // null: nothing is recorded
  std::atomic<uint64_t> operations_{0};
  std::vector<std::unique_ptr<ExpertRows>> expert_rows_;
  std::vector<std::unique_ptr<Adapter>> adapters_;  // by slot
  std::unique_ptr<GreedyHead> greedy_head_;  // null: there is none that could be quicker
  bool last_ = false;  // the head is the last operation: nothing changes the logits after it
  // ids, positions and types that the tables they look up have rows for
  int known_[3] = {INT_MAX, INT_MAX, INT_MAX};
  int output_ = -1, width_ = 0;
  int embedding_width_ = 0;  // of rows that a step may give in place of the table's; 0: none
  bool all_embedded_ = false;  // they have to be given for every token
  int axes_ = 0;  // of coordinates that rotations read
  struct Attended { int layer, heads, kv_heads, head_dim; };
  std::vector<Attended> attended_;  // by each attention
};

}  // namespace octavo
