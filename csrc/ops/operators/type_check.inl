// Type and place of a tensor that goes with others.
void require_type(const char* name, const Tensor& t, ScalarType type) {
  Device::require_here(name, t);
  require(t.scalar_type() == type, name, " must have dtype ", dtype_name(type), " like the others, got ",
          dtype_name(t.scalar_type()));
}
