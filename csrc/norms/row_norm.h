// A normalisation of rows: statistics, and backward from blocks of normalised values:
// docs/format.md, section 11. Include after a vector_*.h.
#pragma once

#include <cmath>

#include "norms/channel_norm.h"
#include "norms/rows.h"

namespace {

// Calls part(place, lanes) for each vector of a row; the last may have fewer lanes.
template <class Part> DAF_INLINE void each_vector_of_row(size_t length, Part&& part) {
  size_t place = 0;
  for (; place + V::lanes <= length; place += V::lanes) part(place, std::true_type{});
  if (place < length) part(place, length - place);
}

DAF_INLINE V::F load_part(const float* from, std::true_type) { return V::load(from); }
// The other lanes are 0.
DAF_INLINE V::F load_part(const float* from, size_t lanes) {
  alignas(64) float room[V::lanes] = {};
  std::memcpy(room, from, lanes * sizeof(float));
  return V::load(room);
}

DAF_INLINE void store_part(float* to, V::F x, std::true_type) { V::store(to, x); }
DAF_INLINE void store_part(float* to, V::F x, size_t lanes) {
  alignas(64) float room[V::lanes];
  V::store(room, x);
  std::memcpy(to, room, lanes * sizeof(float));
}

// Adds the sixteen lanes by halving strides.
DAF_INLINE double fold_lanes(const V::D& lanes) {
  alignas(64) double lane[V::lanes];
  V::store(lane, lanes);
  for (int width = V::lanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}

DAF_INLINE float canonical_float(double value) {
  return value != value ? from_bits(0x7FC00000) : float(value);
}

inline void measure_row(const MeasureRows& job, size_t row) {
  const float* x = job.data + row * job.length;
  V::D sum = V::widen(V::set(0.0f)), square = sum;
  each_vector_of_row(job.length, [&](size_t place, auto lanes) {
    const auto wide = V::widen(load_part(x + place, lanes));
    sum = V::add(sum, wide);
    square = V::add_product(square, wide, wide);
  });
  const double length = double(job.length);
  const double mean = job.centred ? fold_lanes(sum) / length : 0.0;
  const double difference = fold_lanes(square) / length - mean * mean;
  const double variance = job.centred && difference < 0 ? 0.0 : difference;
  const double inverse = 1.0 / std::sqrt(variance + job.epsilon);
  job.scale[row] = canonical_float(inverse);
  job.shift[row] = job.centred ? canonical_float(-(mean * inverse)) : 0.0f;
}

inline bool measure_rows_range(const MeasureRows& job, size_t first, size_t last) {
  for (size_t row = first; row < last; ++row) measure_row(job, row);
  return true;
}

class RowTaker {
 public:
  RowTaker(const RowGradient& job, const RunningRows& running)
      : job_(job), length_(running.whole->plan.length) {
    const size_t first = running.row * length_;
    gradient_ = job.gradient + first;
    destination_ = job.destination ? job.destination + first : nullptr;
    const uint64_t sums = running.row / rows_per_span * padded_length(running.whole->plan);
    beta_ = running.whole->beta + sums;
    gamma_ = running.whole->gamma + sums;
  }

  void take(const float* values, float scale) const {
    auto sum = V::set(0.0f), product = V::set(0.0f);
    each_vector_of_row(length_, [&](size_t place, auto lanes) {
      const auto value = load_part(values + place, lanes);
      const auto given = load_part(gradient_ + place, lanes);
      if (job_.beta) {
        add_to(beta_ + place, given);
        add_to(gamma_ + place, V::multiply(given, value));
      }
      const auto scaled = by_gamma(given, place, lanes);
      sum = V::add(sum, scaled);
      product = V::add(product, V::multiply(scaled, value));
    });
    if (destination_) write(values, scale, V::tree_sum(sum), V::tree_sum(product));
  }

 private:
  void write(const float* values, float scale, float sum, float product) const {
    const double wide = double(scale), length = double(length_);
    const auto of_value = V::set(float(-(wide * (double(product) / length))));
    const auto offset = V::set(job_.centred ? float(-(wide * (double(sum) / length))) : 0.0f);
    const auto of_gradient = V::set(scale);
    each_vector_of_row(length_, [&](size_t place, auto lanes) {
      const auto given = by_gamma(load_part(gradient_ + place, lanes), place, lanes);
      const auto value = V::multiply(load_part(values + place, lanes), of_value);
      const auto found = V::add(V::multiply(given, of_gradient), V::add(value, offset));
      store_part(destination_ + place, canonical(found), lanes);
    });
  }

  static DAF_MEMBER_INLINE void add_to(float* sums, V::F more) {
    V::store(sums, V::add(V::load(sums), more));
  }

  template <class Lanes>
  DAF_MEMBER_INLINE V::F by_gamma(V::F given, size_t place, Lanes lanes) const {
    if (!job_.gamma) return given;
    return V::multiply(given, load_part(job_.gamma + place, lanes));
  }

  const RowGradient& job_;
  const size_t length_;
  const float* gradient_;
  float* destination_;
  float *beta_, *gamma_;
};

// Takes a block of normalised values, of which `left` are the tensor's, and finishes whole rows.
DAF_NEVER_INLINE void take_row_values(const Job& all, const Block& block, uint64_t left) {
  const RowGradient& job = all.row_gradient;
  RunningRows& running = *all.running_rows;
  const size_t length = running.whole->plan.length;
  DAF_EACH_VECTOR V::store(running.values + running.filled + V::lanes * t, block.x[t]);
  running.filled += left < block_elements ? size_t(left) : block_elements;
  if (running.filled < length) return;
  const float* values = running.values;
  for (; running.filled >= length; running.filled -= length, values += length) {
    RowTaker(job, running).take(values, job.scale[running.row]);
    ++running.row;
  }
  std::memmove(running.values, values, running.filled * sizeof(float));
}

}  // namespace
