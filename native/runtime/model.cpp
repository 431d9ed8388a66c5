// A model's life: weights, adapters, cache. model_record.cpp records it, model_step.cpp runs it.
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
    : Model(isa, std::make_shared<Team>(1), threads, limits, std::make_unique<Arena>(),
          std::make_unique<Arena>()) {}

Model::Model(const std::string& isa, int threads, Limits limits, size_t weight_bytes,
    size_t buffer_bytes, const Model* beside)
    : Model(isa, beside ? beside->team_ : std::make_shared<Team>(threads), threads, limits,
          std::make_unique<Arena>(weight_bytes), std::make_unique<Arena>(buffer_bytes)) {
  if (team_->size() != threads) throw std::invalid_argument("models share as many threads");
}

Model::Model(const std::string& isa, std::shared_ptr<Team> team, int threads, Limits limits,
    std::unique_ptr<Arena> weights, std::unique_ptr<Arena> buffers)
    : kernels_(select_kernels(isa)),
      team_(std::move(team)),
      limits_(limits),
      weights_(std::move(weights)),
      buffers_arena_(std::move(buffers)) {
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
  std::vector<uint64_t> sums(
      align_up((bytes + SECTION - 1) / SECTION, CHECKSUM_LINE / sizeof(uint64_t)));
  team_->run([&](int thread, Work& work) {
    work.each(thread, int((bytes + SECTION - 1) / SECTION), 1, [&](int begin, int end) {
      for (size_t i = size_t(begin); i < size_t(end); i++)
        sums[i] = checksum(data + i * SECTION, std::min(SECTION, bytes - i * SECTION), i);
    });
  });
  return checksum(
      reinterpret_cast<const uint8_t*>(sums.data()), sums.size() * sizeof(uint64_t), bytes);
}

size_t Model::matrix_bytes(Storage s, size_t rows, size_t cols) {
  return align_up(
      (rows + PANEL - 1) / PANEL * panel_bytes(panel_format(s.type), s.group, cols), 64);
}

Matrix& Model::new_matrix(Storage s, size_t data_bytes, size_t rows, size_t cols) {
  if (needs_weights() && data_bytes != stored_bytes(s, rows, cols))
    throw std::invalid_argument("tensor bytes do not match its shape");
  const Format f = panel_format(s.type);
  uint8_t* panels = weights_->allocate<uint8_t>(matrix_bytes(s, rows, cols));
  matrices_.push_back(std::make_unique<Matrix>(
      Matrix{s, f, rows, cols, panel_bytes(f, s.group, cols), int(matrices_.size()), panels}));
  return *matrices_.back();
}

int Model::add_matrix(Storage s, const uint8_t* data, size_t data_bytes, size_t rows, size_t cols) {
  const Matrix& m = new_matrix(s, data_bytes, rows, cols);
  if (needs_weights()) team_->run([&](int thread, Work& work) {
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
    team_->run([&](int thread, Work& work) {
      work.each(
          thread, int((bytes + POPULATE_BYTES - 1) / POPULATE_BYTES), 1, [&](int begin, int end) {
            populate(m->stored + size_t(begin) * POPULATE_BYTES,
                m->stored + std::min(bytes, size_t(end) * POPULATE_BYTES));
          });
    });
  }
}

bool Model::pack(size_t bytes) {
  for (; stored_ < matrices_.size(); stored_++) {
    Matrix& m = *matrices_[stored_];
    if (!m.stored) continue;
    if (!bytes) return true;
    const int from = m.packed,
              to = std::min(
                  m.panel_count(), from + int((bytes + m.panel_bytes - 1) / m.panel_bytes));
    team_->run([&](int thread, Work& work) {
      work.each(thread, to - from, 1,
          [&](int begin, int end) { m.pack(m.stored, from + begin, from + end); });
    });
    m.packed = to;
    if (to < m.panel_count()) return true;
    bytes -= std::min(bytes, size_t(to - from) * m.panel_bytes);
    give_back(m.stored, m.stored + m.bytes());
    m.stored = nullptr;
  }
  return greedy_head_ && !greedy_head_->ready() && greedy_head_->measure(bytes, *team_);
}

int Model::add_vector(const float* data, size_t n) {
  float* p = weights_->allocate<float>(align_up(n, 16));
  if (needs_weights()) memcpy(p, data, n * sizeof(float));
  vectors_.push_back(p);
  return int(vectors_.size()) - 1;
}

void Model::allow_adapters() {
  context_.low_rank_tokens = limits_.tokens;
  context_.low_rank =
      buffers_arena_->allocate<float>(size_t(ADAPTED_PARTS) * size_t(limits_.tokens) * MAX_RANK);
}

int Model::add_adapter(const std::vector<Adapter::Part>& parts) {
  for (const Adapter::Part& p : parts) {
    const Matrix& m = *matrix(p.matrix);
    if (p.rank < 1 || p.rank > MAX_RANK || p.inputs != m.cols || p.outputs != m.rows)
      throw std::invalid_argument("an adapter does not fit its matrix");
    if (p.type != GGML_F32 && p.type != GGML_BF16)
      throw std::invalid_argument("adapters are fp32 or bf16");
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
    if (s.head_dim > WIDEST_HEAD)
      throw std::invalid_argument("attention heads wider than 512 are not supported");
    const int padded = int(align_up(size_t(s.head_dim), 16));
    kv.layers.push_back({s, padded, kv_head_bytes(type, padded), kv.block_bytes});
    kv.block_bytes += kv_block_bytes(type, s);
  }
  const size_t bytes = kv.block_bytes * size_t(blocks);
  cache_ = buffers_arena_->writable() ? std::make_unique<Arena>(bytes) : std::make_unique<Arena>();
  kv.data = cache_->allocate<uint8_t>(bytes);
  size_t heads = 0, values = 0;  // of the widest attention
  for (const Attended& a : attended_) {
    const bool has = a.layer >= 0 && size_t(a.layer) < layers.size();
    const KvShape s = has ? layers[size_t(a.layer)] : KvShape{};
    if (s.heads != a.kv_heads || s.head_dim != a.head_dim)
      throw std::invalid_argument("an attention does not fit its layer's cache");
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
  if (!kv.block_bytes) return false;
  const int margin = int(std::min(size_t(kv.blocks), ahead / kv.block_bytes));
  if (prefaulted_ - reached < margin / 2) claiming_ = std::min(kv.blocks, reached + margin);
  const int end = std::min(claiming_, reached + margin);  // it may have been claimed for more
  if (prefaulted_ >= end) return false;
  const int from = std::max(prefaulted_, reached);
  prefaulted_ = int(std::min(size_t(end), size_t(from) + bytes / kv.block_bytes + 1));
  team_->run([&](int thread, Work& work) {
    work.each(thread, prefaulted_ - from, 1, [&](int begin, int last) {
      octavo::prefault(kv.block(from + begin), kv.block(from + last));
    });
  });
  return prefaulted_ < end;
}

void Model::copy_block(int from, int to) {
  const KvCache& kv = context_.kv;
  if (from < 0 || to < 0 || from >= kv.blocks || to >= kv.blocks)
    throw std::invalid_argument("no such KV block");
  memcpy(kv.block(to), kv.block(from), kv.block_bytes);
}

}  // namespace octavo
