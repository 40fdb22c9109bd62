// Where the states of sequences lie: in blocks like those of tokens, row by row.
//
// A state is a list of rows of `row_floats` floats, or twice as many elements of 16 bits. For each layer, the last taps
// - 1 inputs of its convolution come first (of each group's query, of each group's key, of each head's values; tap by
// tap, each as whole rows). The rows of each head's matrix follow. A block of tokens has a piece in every layer with
// attention; each piece holds as many rows as fit. Where no layer has attention, a block has as many rows as tokens,
// and tokens take no room in it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "rworker/layout.hpp"
#include "rworker/types.hpp"

namespace rworker {

class StatePlaces {
  public:
    StatePlaces(const std::vector<LayerSpec>& layers, const std::vector<LayerLayout>& layouts);

    /// Blocks that the state of one sequence takes; 0 where no layer has a state. The blocks after the first
    /// `num_filled` stay empty: they account for the memory of rows kept beside the state.
    std::int64_t num_blocks() const { return num_blocks_; }
    std::int64_t num_filled() const { return num_filled_; }
    /// Most rows of a step that are kept because they may be undone, and their bytes over all layers at most. The rows
    /// of one layer begin at its offset.
    std::int64_t most_kept() const { return most_kept_; }
    /// Fewest attending rows of a sequence that are kept. A single row is undone only after an S-worker's loss.
    std::int64_t least_kept() const { return keeps_single_ ? 1 : 2; }
    std::int64_t kept_bytes() const { return kept_offsets_.back(); }
    std::int64_t kept_offset(std::int64_t layer_index) const { return kept_offsets_[layer_index]; }
    /// Where a single attending row leaves its keys [groups, round_up16(key_dim)] and each head's input of the matrix
    /// product [heads, round_up16(value_dim)], as floats, beside the kept rows.
    std::int64_t pending_offset(std::int64_t layer_index) const { return pending_offsets_[layer_index]; }
    std::int64_t num_rows() const { return num_rows_; }
    std::int64_t row_floats() const { return row_floats_; }
    /// Fewest floats of a row that can hold the elements of a layer: whole lines of 64 bytes.
    static std::int64_t row_floats(const StateSpec& state) {
        const std::int64_t elements = 64 / item_bytes(state.dtype);
        return (state.value_dim + elements - 1) / elements * 16;
    }
    std::int64_t num_bytes() const { return num_rows_ * row_floats_ * 4; }

    /// First row of a layer, and the number of its rows.
    std::int64_t first_row(std::int64_t layer_index) const { return first_rows_[layer_index]; }
    std::int64_t rows_of_layer(std::int64_t layer_index) const {
        return first_rows_[layer_index + 1] - first_rows_[layer_index];
    }
    /// Rows that `dim` channels take for one tap.
    std::int64_t rows_of(std::int64_t dim) const { return (dim + row_floats_ - 1) / row_floats_; }
    /// First row of the window of a group's query or key, or of a head's values; taps are consecutive.
    std::int64_t query_window(const LayerSpec& layer, std::int64_t layer_index, std::int64_t group) const;
    std::int64_t key_window(const LayerSpec& layer, std::int64_t layer_index, std::int64_t group) const;
    std::int64_t value_window(const LayerSpec& layer, std::int64_t layer_index, std::int64_t head) const;
    /// First row of a head's matrix.
    std::int64_t matrix(const LayerSpec& layer, std::int64_t layer_index, std::int64_t head) const;

    float* row(std::uint8_t* arena, const std::int32_t* blocks, std::int64_t index) const {
        const Place& place = places_[index % std::int64_t(places_.size())];
        const std::int64_t block = blocks[index / std::int64_t(places_.size())];
        return reinterpret_cast<float*>(arena + place.first_byte + block * place.block_bytes);
    }

    /// Calls each(row, count): `count` rows from one on, in pieces whose rows are consecutive in memory.
    template <class Each>
    void pieces(std::uint8_t* arena, const std::int32_t* blocks, std::int64_t first, std::int64_t count, Each each) const {
        const std::int64_t all = std::int64_t(places_.size());
        std::int64_t place = first % all;
        blocks += first / all;
        while (count > 0) {
            const Place& at = places_[place];
            const std::int64_t length = std::min(at.length, count);
            each(reinterpret_cast<float*>(arena + at.first_byte + *blocks * at.block_bytes), length);
            count -= length, place += length;
            if (place == all) place = 0, ++blocks;
        }
    }

  private:
    void place_kept(const std::vector<LayerSpec>& layers);

    struct Place {
        std::int64_t first_byte, block_bytes, length;  // consecutive rows from here on
    };

    std::int64_t num_blocks_ = 0, num_filled_ = 0, num_rows_ = 0, row_floats_ = 0, most_kept_ = 0;
    bool keeps_single_ = false;
    std::vector<std::int64_t> kept_offsets_, pending_offsets_;  // bytes; of each layer, and one after the last
    std::vector<std::int64_t> first_rows_;  // of each layer, and one after the last
    std::vector<Place> places_;             // of the rows of one block
};

}  // namespace rworker
