#include <pybind11/stl.h>

#include "rworker/kernel_choice.hpp"
#include "rworker/picks.hpp"
#include <algorithm>
#include <array>
#include <bit>

#include "rworker_binding.hpp"

namespace rworker_binding {
namespace {

using rworker::DType;
using rworker::Error;
using rworker::RangePart;
using Table = py::array_t<std::int64_t, py::array::c_style>;

void require(bool holds, const std::string& message) {
    if (!holds) throw Error("merge_partials: " + message);
}

std::int64_t rows_of(const Table& table, const char* name, py::ssize_t columns) {
    require(table.ndim() == 2 && table.shape(1) == columns,
            std::string(name) + " must be an int64 array of shape (n, " + std::to_string(columns) + "), not " +
                describe(table));
    return table.shape(0);
}

/// `out` and its partial results, checked and without Python objects.
struct Merge {
    DType dtype;
    std::int64_t num_rows, num_heads, value_dim;
    std::uint8_t* out;
    std::vector<std::pair<const float*, std::int64_t>> buffers;  // partial results, and their number of rows

    Merge(const std::vector<py::array>& partials, py::array& rows, const std::string& model_dtype)
        : dtype(rworker::parse_model_dtype(model_dtype)) {
        const bool right_dtype = dtype == DType::float32 ? py::isinstance<py::array_t<float>>(rows)
                                                         : py::isinstance<py::array_t<std::uint16_t>>(rows);
        require(right_dtype && rows.ndim() == 3 && (rows.flags() & py::array::c_style) != 0 && rows.writeable(),
                "out must be a writeable, C-contiguous array of three dimensions in the model's dtype, not " +
                    describe(rows));
        num_rows = rows.shape(0), num_heads = rows.shape(1), value_dim = rows.shape(2);
        require(value_dim >= 1 && value_dim <= rworker::kMaxHeadDim,
                "out has head dim " + std::to_string(value_dim) + "; it must be 1 to " +
                    std::to_string(rworker::kMaxHeadDim));
        out = static_cast<std::uint8_t*>(rows.mutable_data());
        for (const py::array& each : partials) {
            check_partials(each, -1, num_heads, rworker::node_floats(value_dim));
            buffers.emplace_back(static_cast<const float*>(each.data()), each.shape(0));
        }
    }

    /// A row of `parts`: buffer, first row, rows from one token's to the next's, first split, splits.
    RangePart part(const std::int64_t* row, std::int64_t num_tokens, std::int64_t next_split) const {
        const auto [buffer, first, step, start, width] = std::array{row[0], row[1], row[2], row[3], row[4]};
        require(buffer >= 0 && buffer < std::int64_t(buffers.size()),
                "there is no array " + std::to_string(buffer) + " of partial results");
        const std::int64_t most = buffers[buffer].second;
        require(first >= 0 && first < most && step >= 1 && step <= most && num_tokens <= (most - 1 - first) / step + 1,
                "rows " + std::to_string(first) + " and every " + std::to_string(step) + "th after it, " +
                    std::to_string(num_tokens) + " in all, are not among the " + std::to_string(most) + " of array " +
                    std::to_string(buffer));
        require(start >= 0 && start < kMostSplits && width >= 1 && width <= kMostSplits &&
                    std::has_single_bit(std::uint64_t(width)) && start % width == 0 &&
                    (next_split < 0 || start == next_split),
                std::to_string(width) + " splits from " + std::to_string(start) +
                    " on; parts follow one another, of powers of two of splits that begin at multiples of them");
        const std::int64_t row_floats = num_heads * rworker::node_floats(value_dim);
        return {buffers[buffer].first + first * row_floats, step * row_floats, start, width};
    }

    static constexpr std::int64_t kMostSplits = std::int64_t(1) << 40;
};

void merge_partials(const std::vector<py::array>& partials, const Table& parts, const Table& spans,
                    const std::vector<float>& sinks, py::array out, const std::string& model_dtype,
                    const std::string& isa) {
    const std::int64_t num_parts = rows_of(parts, "parts", 5), num_spans = rows_of(spans, "spans", 4);
    const Merge merge(partials, out, model_dtype);
    require(sinks.empty() || std::int64_t(sinks.size()) == merge.num_heads,
            "sinks must be empty or one per head (" + std::to_string(merge.num_heads) + "), not " +
                std::to_string(sinks.size()));
    std::vector<rworker::CombineArgs> calls;
    std::vector<RangePart> all;
    all.reserve(std::size_t(num_parts));
    std::int64_t most_parts = 0;
    for (std::int64_t i = 0; i < num_spans; ++i) {
        const auto [row, count, first, num] = std::array{spans.at(i, 0), spans.at(i, 1), spans.at(i, 2), spans.at(i, 3)};
        require(row >= 0 && count >= 1 && count <= merge.num_rows && row <= merge.num_rows - count,
                std::to_string(count) + " rows from " + std::to_string(row) + " on, and out has " +
                    std::to_string(merge.num_rows));
        require(num >= 1 && first == std::int64_t(all.size()) && num <= num_parts - first,
                "spans must name all parts in order, at least one each");
        for (std::int64_t j = 0, next = -1; j < num; ++j, next = all.back().start + all.back().width)
            all.push_back(merge.part(parts.data(first + j, 0), count, next));
        const std::int64_t offset = row * merge.num_heads * merge.value_dim * rworker::item_bytes(merge.dtype);
        calls.push_back({all.data() + first, num, count, int(merge.num_heads), int(merge.value_dim),
                         sinks.empty() ? nullptr : sinks.data(), merge.dtype, merge.out + offset, nullptr});
        most_parts = std::max(most_parts, num);
    }
    const rworker::Kernels& kernels = rworker::choose_kernels(isa);
    const py::gil_scoped_release unlocked;
    std::vector<float> scratch(std::size_t((most_parts + 1) * rworker::partial_floats(merge.value_dim)));
    for (rworker::CombineArgs& call : calls) {
        call.scratch = scratch.data();
        kernels.combine(call);
    }
}

using Counts = py::array_t<std::int32_t, py::array::c_style>;

/// Ranks of one buffer, and where the counts of that buffer go.
struct Ranked {
    const std::uint32_t* ranks;
    std::int32_t* counts;
    std::int64_t num_rows;
};

std::vector<Counts> share_picks(const std::vector<py::array>& partials, const Table& parts, const Table& spans) {
    const std::int64_t num_parts = rows_of(parts, "parts", 5), num_spans = rows_of(spans, "spans", 4);
    std::vector<Counts> counts;
    std::vector<Ranked> buffers;
    std::int64_t heads = 0, most = 0;
    for (const py::array& each : partials) {
        require(each.ndim() == 3, "partials must have three dimensions");
        if (buffers.empty()) heads = each.shape(1), most = each.shape(2);
        check_partials(each, -1, heads, most);
        Counts& made = counts.emplace_back(std::vector<py::ssize_t>{each.shape(0), heads});
        std::fill_n(made.mutable_data(), made.size(), 0);
        buffers.push_back({static_cast<const std::uint32_t*>(each.data()), made.mutable_data(), each.shape(0)});
    }
    std::vector<const std::uint32_t*> ranks;
    std::vector<std::int32_t> found;
    for (std::int64_t i = 0; i < num_spans; ++i) {
        const auto [rows, first, num] = std::array{spans.at(i, 1), spans.at(i, 2), spans.at(i, 3)};
        require(rows >= 1 && first >= 0 && num >= 1 && first <= num_parts && num <= num_parts - first,
                "spans must name parts that are there");
        ranks.resize(num), found.resize(num);
        for (std::int64_t j = first; j < first + num; ++j) {
            const auto [buffer, row, step] = std::array{parts.at(j, 0), parts.at(j, 1), parts.at(j, 2)};
            require(buffer >= 0 && buffer < std::int64_t(buffers.size()), "there is no such array of partial results");
            const std::int64_t all = buffers[buffer].num_rows;
            require(row >= 0 && row < all && step >= 1 && rows - 1 <= (all - 1 - row) / step, "rows that are not there");
        }
        for (std::int64_t row = 0; row < rows; ++row)
            for (std::int64_t head = 0; head < heads; ++head) {
                const auto at = [&](std::int64_t j) {
                    return (parts.at(first + j, 1) + row * parts.at(first + j, 2)) * heads + head;
                };
                for (std::int64_t j = 0; j < num; ++j) ranks[j] = buffers[parts.at(first + j, 0)].ranks + at(j) * most;
                rworker::share_picks(ranks, most, found);
                for (std::int64_t j = 0; j < num; ++j) buffers[parts.at(first + j, 0)].counts[at(j)] = found[j];
            }
    }
    return counts;
}

}  // namespace

void bind_merge(py::module_& module) {
    module.def("share_picks", &share_picks, py::arg("partials").noconvert(), py::arg("parts").noconvert(),
               py::arg("spans").noconvert());
    module.def("merge_partials", &merge_partials, py::arg("partials").noconvert(), py::arg("parts").noconvert(),
               py::arg("spans").noconvert(), py::arg("sinks"), py::arg("out").noconvert(), py::arg("model_dtype"),
               py::arg("isa") = "auto");
}

}  // namespace rworker_binding
