// Reads layers from Python: a record (fastdecode.kinds), each field by its name.
#include <pybind11/stl.h>

#include <algorithm>

#include "rworker_binding.hpp"

namespace rworker_binding {

namespace {

using rworker::Error;
using rworker::LayerSpec;

/// The fields of a record. `name` begins its errors.
class Record {
  public:
    Record(py::object record, std::string name) : record_(std::move(record)), name_(std::move(name)) {}

    template <class Value>
    Value get(const char* field) const {
        const py::object value = object(field);
        try {
            return value.cast<Value>();
        } catch (const py::cast_error&) {
            throw Error(name_ + "." + field + " is " + py::repr(value).cast<std::string>() + ", which cannot be one");
        }
    }
    bool has(const char* field) const { return !object(field).is_none(); }
    Record record(const char* field) const { return {object(field), name_ + "." + field}; }
    std::vector<float> float_bytes(const char* field) const {
        const std::string bytes = get<std::string>(field);
        std::vector<float> floats(bytes.size() / sizeof(float));
        std::copy_n(bytes.data(), floats.size() * sizeof(float), reinterpret_cast<char*>(floats.data()));
        return floats;
    }
    const std::string& name() const { return name_; }

  private:
    py::object object(const char* field) const {
        if (!py::hasattr(record_, field))
            throw Error(name_ + " has no field " + field + "; it must be a layer of fastdecode.kinds");
        return record_.attr(field);
    }

    py::object record_;
    std::string name_;
};

}  // namespace

std::vector<LayerSpec> parse_layers(const py::list& layers) {
    std::vector<LayerSpec> specs(layers.size());
    for (std::size_t i = 0; i < layers.size(); ++i) {
        const Record record(py::reinterpret_borrow<py::object>(layers[i]), "layers[" + std::to_string(i) + "]");
        if (!rworker::read_layer(record, specs[i]))
            throw Error(record.name() + " is a layer of kind '" + record.get<std::string>("kind") +
                        "', which this build does not know");
    }
    return specs;
}

}  // namespace rworker_binding
