// Layers as Python has them: a record, each field of it by its name.
#include <pybind11/stl.h>

#include <algorithm>

#include "rworker_binding.hpp"

namespace rworker_binding {

namespace {

using rworker::Error;
using rworker::LayerSpec;
using rworker::StateKind;

/// A record's fields. `name` begins its errors, `type` is the Python class that has these fields.
class Record {
  public:
    Record(py::object record, std::string name, const char* type, std::initializer_list<const char*> fields)
        : record_(std::move(record)), name_(std::move(name)) {
        std::string missing;
        for (const char* field : fields)
            if (!py::hasattr(record_, field)) missing.append(missing.empty() ? "" : ", ").append(field);
        if (!missing.empty()) throw Error(name_ + " must have the fields of a " + type + "; it lacks " + missing);
    }

    template <class Value>
    Value get(const char* field) const {
        const py::object value = record_.attr(field);
        try {
            return value.cast<Value>();
        } catch (const py::cast_error&) {
            throw Error(name_ + "." + field + " is " + py::repr(value).cast<std::string>() + ", which cannot be one");
        }
    }
    std::int64_t integer(const char* field) const { return get<std::int64_t>(field); }
    py::object object(const char* field) const { return record_.attr(field); }
    std::vector<float> float_bytes(const char* field) const {
        const std::string bytes = get<std::string>(field);
        std::vector<float> floats(bytes.size() / sizeof(float));
        std::copy_n(bytes.data(), floats.size() * sizeof(float), reinterpret_cast<char*>(floats.data()));
        return floats;
    }
    const std::string& name() const { return name_; }

  private:
    py::object record_;
    std::string name_;
};

StateKind parse_kind(const Record& state) {
    const std::string kind = state.get<std::string>("kind");
    const char* const kinds[] = {"delta", "scan", "window", "selective", "lru"};
    const auto found = std::find(std::begin(kinds), std::end(kinds), kind);
    if (found == std::end(kinds)) throw Error(state.name() + ".kind is '" + kind + "'; it must be delta, scan, window, selective or lru");
    return StateKind(found - kinds);
}

/// Of a recurrent layer only these numbers count.
LayerSpec parse_state(const Record& layer, const Record& state) {
    LayerSpec spec{.num_heads = layer.integer("num_heads"), .num_kv_heads = 0, .key_dim = 0,
                   .value_dim = layer.integer("value_head_dim"), .scale = 1.0f, .window = 0, .soft_cap = 0.0f, .sinks = {}};
    spec.state = std::make_shared<const rworker::StateSpec>(rworker::StateSpec{
        .kind = parse_kind(state),
        .heads = spec.num_heads,
        .groups = state.integer("groups"),
        .key_dim = state.integer("key_dim"),
        .value_dim = spec.value_dim,
        .taps = state.integer("taps"),
        .decays = state.integer("decays"),
        .silu = state.get<bool>("silu"),
        .norm = state.get<bool>("norm"),
        .scale = layer.get<float>("scale"),
        .filters = state.float_bytes("filters"),
        .bias = state.float_bytes("bias"),
        .skip = state.float_bytes("skip"),
        .factors = state.float_bytes("factors"),
        .kept_rows = state.integer("kept_rows"),
        .dtype = rworker::parse_model_dtype(state.get<std::string>("dtype")),
        .keeps_single = state.get<bool>("keeps_single"),
    });
    return spec;
}

LayerSpec parse_layer(const py::handle& item, const std::string& name) {
    const Record layer(py::reinterpret_borrow<py::object>(item), name, "LayerLayout",
                       {"num_heads", "num_kv_heads", "key_head_dim", "value_head_dim", "scale", "window", "soft_cap",
                        "sinks", "alibi_slopes", "values_in_keys", "chunked", "picks", "pick_block", "pick_local",
                        "picked_by", "absorption", "state"});
    if (!layer.object("state").is_none())
        return parse_state(layer, {layer.object("state"), name + ".state", "StateLayout",
                                   {"kind", "groups", "key_dim", "taps", "decays", "silu", "norm", "filters", "bias",
                                    "skip", "factors", "kept_rows", "dtype", "keeps_single"}});
    LayerSpec spec{
        .num_heads = layer.integer("num_heads"),
        .num_kv_heads = layer.integer("num_kv_heads"),
        .key_dim = layer.integer("key_head_dim"),
        .value_dim = layer.integer("value_head_dim"),
        .scale = layer.get<float>("scale"),
        .window = layer.integer("window"),
        .soft_cap = layer.get<float>("soft_cap"),
        .sinks = layer.get<std::vector<float>>("sinks"),
        .alibi_slopes = layer.get<std::vector<float>>("alibi_slopes"),
        .values_in_keys = layer.get<bool>("values_in_keys"),
        .chunked = layer.get<bool>("chunked"),
        .picks = layer.integer("picks"),
        .pick_block = layer.integer("pick_block"),
        .pick_local = layer.integer("pick_local"),
        .picked_by = layer.integer("picked_by"),
    };
    if (layer.object("absorption").is_none()) return spec;
    const Record absorption(layer.object("absorption"), name + ".absorption", "Absorption", {"nope_dim", "value_dim"});
    spec.absorbed_nope = absorption.integer("nope_dim");
    spec.absorbed_value = absorption.integer("value_dim");
    return spec;
}

/// As callers of older builds pass one.
LayerSpec parse_tuple(const py::handle& item, std::size_t index) {
    const std::size_t size = py::isinstance<py::tuple>(item) ? py::len(item) : 0;
    if ((size < 9 || size > 11) && size != 15)
        throw Error("layers[" + std::to_string(index) +
                    "] must be a tuple (num_heads, num_kv_heads, key_head_dim, value_head_dim, scale, window, "
                    "soft_cap, sinks, alibi_slopes[, values_in_keys[, chunked[, picks, pick_block, pick_local, "
                    "picked_by]]])");
    const auto values = py::reinterpret_borrow<py::tuple>(item);
    LayerSpec layer{values[0].cast<std::int64_t>(), values[1].cast<std::int64_t>(),
            values[2].cast<std::int64_t>(), values[3].cast<std::int64_t>(),
            values[4].cast<float>(),        values[5].cast<std::int64_t>(),
            values[6].cast<float>(),        values[7].cast<std::vector<float>>(),
            values[8].cast<std::vector<float>>(), values.size() > 9 && values[9].cast<bool>(),
            values.size() > 10 && values[10].cast<bool>()};
    if (values.size() < 15) return layer;
    layer.picks = values[11].cast<std::int64_t>();
    layer.pick_block = values[12].cast<std::int64_t>();
    layer.pick_local = values[13].cast<std::int64_t>();
    layer.picked_by = values[14].cast<std::int64_t>();
    return layer;
}

}  // namespace

std::vector<LayerSpec> parse_layers(const py::list& layers) {
    std::vector<LayerSpec> specs;
    for (std::size_t i = 0; i < layers.size(); ++i)
        specs.push_back(py::isinstance<py::tuple>(layers[i]) ? parse_tuple(layers[i], i)
                                                             : parse_layer(layers[i], "layers[" + std::to_string(i) + "]"));
    return specs;
}

}  // namespace rworker_binding
