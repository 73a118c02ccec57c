#include "checkpoint/hdf5.h"

#include <fcntl.h>
#include <hdf5.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <mutex>

#if H5_VERSION_LE(1, 9, 0)
#error "HDF5 1.10 or later is needed: virtual datasets"
#endif

namespace annulus::checkpoint::hdf5 {
namespace {

static_assert(std::endian::native == std::endian::little, "values are stored as they lie in memory");

// HDF5 may or may not be built thread-safe: one lock serialises a reader and the writer's thread.
class Api {
 public:
  Api() : lock_(mutex()) {
    static const bool once = [] {
      H5dont_atexit();  // every file is closed by its owner; one that could not be must not be met again at exit
      H5open();
      H5PLset_loading_state(0);  // a file cannot make this process load a filter library
      return true;
    }();
    (void)once;
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);  // of this thread
  }

 private:
  static std::recursive_mutex& mutex() {
    static auto* m = new std::recursive_mutex;  // outlives every static object that may close a file
    return *m;
  }
  std::lock_guard<std::recursive_mutex> lock_;
};

std::string innermost_reason() {
  std::string text;
  H5Ewalk2(
      H5E_DEFAULT, H5E_WALK_UPWARD,
      [](unsigned n, const H5E_error2_t* error, void* out) -> herr_t {
        if (n == 0 && error->desc) *static_cast<std::string*>(out) = error->desc;
        return 0;
      },
      &text);
  // The system's message alone, where there is one: "file write failed: …, error message = 'No space left on device',
  // …".
  constexpr std::string_view kMark = "error message = '";
  if (const auto begin = text.find(kMark); begin != text.npos) {
    const auto from = begin + kMark.size();
    return text.substr(from, text.find('\'', from) - from);
  }
  return text.empty() ? "no reason given" : text;
}

template <class T>
T check(T result, const std::string& where, const char* call) {
  if (result < 0) throw CheckpointError(fmt::format("{}: {}: {}", where, call, innermost_reason()));
  return result;
}

int close_file(std::int64_t id) { return H5Fclose(id); }
int close_group(std::int64_t id) { return H5Gclose(id); }
int close_object(std::int64_t id) { return H5Oclose(id); }
int close_dataset(std::int64_t id) { return H5Dclose(id); }
int close_space(std::int64_t id) { return H5Sclose(id); }
int close_list(std::int64_t id) { return H5Pclose(id); }
int close_type(std::int64_t id) { return H5Tclose(id); }
int close_attribute(std::int64_t id) { return H5Aclose(id); }

Id make_list(hid_t kind, const std::string& where) { return {check(H5Pcreate(kind), where, "H5Pcreate"), close_list}; }

Id type_of(DType dtype, const std::string& where) {
  const hid_t base = dtype == DType::f64 ? H5T_IEEE_F64LE : H5T_IEEE_F32LE;
  Id type(check(H5Tcopy(base), where, "H5Tcopy"), close_type);
  if (dtype == DType::bf16) {  // sign 1, exponent 8 with bias 127, mantissa 7
    check(H5Tset_fields(type.get(), 15, 7, 8, 0, 7), where, "H5Tset_fields");
    check(H5Tset_precision(type.get(), 16), where, "H5Tset_precision");
    check(H5Tset_ebias(type.get(), 127), where, "H5Tset_ebias");
    check(H5Tset_size(type.get(), 2), where, "H5Tset_size");
  }
  return type;
}

using Dims = std::array<hsize_t, 2>;
Dims dims_of(std::int64_t rows, std::int64_t cols) { return {static_cast<hsize_t>(rows), static_cast<hsize_t>(cols)}; }

Id space_of(int rank, const Dims& dims, const std::string& where) {
  return {check(H5Screate_simple(rank, dims.data(), nullptr), where, "H5Screate_simple"), close_space};
}

void select(const Id& space, const Rect& r, const std::string& where) {
  const Dims start = dims_of(r.row, r.col), count = dims_of(r.rows, r.cols);
  check(H5Sselect_hyperslab(space.get(), H5S_SELECT_SET, start.data(), nullptr, count.data(), nullptr), where,
        "H5Sselect_hyperslab");
}

void attach(const Id& object, const char* name, const Id& type, const Id& space, const void* data,
            const std::string& where) {
  const Id attribute(
      check(H5Acreate2(object.get(), name, type.get(), space.get(), H5P_DEFAULT, H5P_DEFAULT), where, "H5Acreate2"),
      close_attribute);
  check(H5Awrite(attribute.get(), type.get(), data), where, "H5Awrite");
}

void attach_text(const Id& object, const char* name, std::string_view text, const std::string& where) {
  const Id type(check(H5Tcopy(H5T_C_S1), where, "H5Tcopy"), close_type);
  check(H5Tset_size(type.get(), std::max<std::size_t>(text.size(), 1)), where, "H5Tset_size");
  check(H5Tset_strpad(type.get(), H5T_STR_NULLPAD), where, "H5Tset_strpad");
  check(H5Tset_cset(type.get(), H5T_CSET_UTF8), where, "H5Tset_cset");
  const Id space(check(H5Screate(H5S_SCALAR), where, "H5Screate"), close_space);
  const std::string bytes = text.empty() ? std::string(1, '\0') : std::string(text);
  attach(object, name, type, space, bytes.data(), where);
}

void attach_numbers(const Id& object, const char* name, int rank, std::int64_t a, std::int64_t b,
                    const std::string& where) {
  const Id type(check(H5Tcopy(H5T_STD_I64LE), where, "H5Tcopy"), close_type);
  const std::array<std::int64_t, 2> values{a, b};
  attach(object, name, type, space_of(1, dims_of(rank, 0), where), values.data(), where);
}

// Groups on the way to a dataset are made as needed.
Id making_groups(const std::string& where) {
  Id list = make_list(H5P_LINK_CREATE, where);
  check(H5Pset_create_intermediate_group(list.get(), 1), where, "H5Pset_create_intermediate_group");
  return list;
}

Id access_list(const std::string& where) {
  Id list = make_list(H5P_FILE_ACCESS, where);
  check(H5Pset_libver_bounds(list.get(), H5F_LIBVER_LATEST, H5F_LIBVER_LATEST), where, "H5Pset_libver_bounds");
  check(H5Pset_fclose_degree(list.get(), H5F_CLOSE_STRONG), where, "H5Pset_fclose_degree");
  check(H5Pset_cache(list.get(), 0, 1, 0, 1.0), where, "H5Pset_cache");  // chunks are written and read whole, once
#if H5_VERSION_GE(1, 10, 7)
  check(H5Pset_file_locking(list.get(), false, true), where,
        "H5Pset_file_locking");  // NFS and Lustre; the rename commits
#endif
  return list;
}

void require_hard_link(hid_t place, const char* name, const std::string& where) {
  H5L_info_t info;
  check(H5Lget_info(place, name, &info, H5P_DEFAULT), where, "H5Lget_info");
  if (info.type != H5L_TYPE_HARD) {
    throw CheckpointError(fmt::format("{}: wanted a hard link, found {}", where,
                                      info.type == H5L_TYPE_SOFT ? "a soft link" : "an external link"));
  }
}

constexpr int kMaxGroupDepth = 3;
constexpr std::int64_t kMetadataSlack = std::int64_t{1} << 20;  // more than one dataset adds to HDF5's own structures

void collect(hid_t group, const std::string& prefix, int depth, const std::string& path, std::int64_t limit,
             std::vector<std::string>& out) {
  H5G_info_t info;
  check(H5Gget_info(group, &info), path, "H5Gget_info");
  for (hsize_t i = 0; i < info.nlinks; ++i) {
    char name[512];
    check(H5Lget_name_by_idx(group, ".", H5_INDEX_NAME, H5_ITER_INC, i, name, sizeof name, H5P_DEFAULT), path,
          "H5Lget_name_by_idx");
    const std::string full = prefix + "/" + name, where = path + ": " + full;
    require_hard_link(group, name, where);
    const Id object(check(H5Oopen(group, name, H5P_DEFAULT), where, "H5Oopen"), close_object);
    const H5I_type_t kind = H5Iget_type(object.get());
    if (kind == H5I_DATASET) {
      out.push_back(full);
    } else if (kind != H5I_GROUP || depth == kMaxGroupDepth) {
      throw CheckpointError(fmt::format(
          "{}: {}", where, kind == H5I_GROUP ? "groups nested too deeply" : "neither a group nor a dataset"));
    } else {
      collect(object.get(), full, depth + 1, path, limit, out);
    }
    if (static_cast<std::int64_t>(out.size()) > limit) {
      throw CheckpointError(
          fmt::format("{}: more datasets than the {} of the manifest, among them {}", path, limit, full));
    }
  }
}

void check_storage(const Id& dataset, const Piece& piece, const std::string& where) {
  const Id list(check(H5Dget_create_plist(dataset.get()), where, "H5Dget_create_plist"), close_list);
  const H5D_layout_t layout = H5Pget_layout(list.get());
  if (layout != H5D_CHUNKED && layout != H5D_CONTIGUOUS && layout != H5D_COMPACT) {
    throw CheckpointError(fmt::format("{}: wanted values in this file, found a virtual dataset", where));
  }
  if (H5Pget_external_count(list.get()) != 0) {
    throw CheckpointError(fmt::format("{}: wanted values in this file, found external storage", where));
  }
  if (H5Pget_nfilters(list.get()) != 0)
    throw CheckpointError(fmt::format("{}: wanted plain values, found a filter", where));
  const auto stored = static_cast<std::int64_t>(H5Dget_storage_size(dataset.get()));
  if (stored < piece.bytes()) {
    throw CheckpointError(fmt::format("{}: wanted {} bytes, found {} stored", where, piece.bytes(), stored));
  }
}

void check_type_and_shape(const Id& dataset, const Piece& piece, const std::string& where) {
  const Id found(check(H5Dget_type(dataset.get()), where, "H5Dget_type"), close_type);
  const Id wanted = type_of(piece.dtype, where);
  if (check(H5Tequal(found.get(), wanted.get()), where, "H5Tequal") == 0) {
    throw CheckpointError(fmt::format("{}: wanted {}, found another type of {} bytes", where, name_of(piece.dtype),
                                      H5Tget_size(found.get())));
  }
  const Id space(check(H5Dget_space(dataset.get()), where, "H5Dget_space"), close_space);
  const int rank = H5Sget_simple_extent_ndims(space.get());
  const Shape shape = piece.shape();
  if (rank != shape.rank())
    throw CheckpointError(fmt::format("{}: wanted shape {}, found {} dimensions", where, shape.str(), rank));
  Dims dims{};
  check(H5Sget_simple_extent_dims(space.get(), dims.data(), nullptr), where, "H5Sget_simple_extent_dims");
  for (int i = 0; i < rank; ++i) {
    const hsize_t d = dims[static_cast<std::size_t>(i)];
    if (d != static_cast<hsize_t>(shape[i])) {
      throw CheckpointError(fmt::format("{}: wanted shape {}, found {} in dimension {}", where, shape.str(), d, i));
    }
  }
}

}  // namespace

Id::~Id() {
  if (id_ < 0) return;
  const Api api;
  close_(id_);
}

void Dataset::read(const Rect& block, void* out) const {
  const Api api;
  const Id file_space(check(H5Dget_space(id_.get()), name_, "H5Dget_space"), close_space);
  select(file_space, block, name_);
  const Id memory_space = space_of(rank_, dims_of(block.rows, block.cols), name_);
  const Id type = type_of(dtype_, name_);
  check(H5Dread(id_.get(), type.get(), memory_space.get(), file_space.get(), H5P_DEFAULT, out), name_, "H5Dread");
}

File File::create(const std::string& path) {
  const Api api;
  const Id access = access_list(path);
  return File({check(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access.get()), path, "H5Fcreate"), close_file},
              path, true);
}

File File::open(const std::string& path) {
  const Api api;
  const Id access = access_list(path);
  return File({check(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.get()), path, "H5Fopen"), close_file}, path, false);
}

File::~File() {
  if (writing_) abandon();
}

int File::descriptor() const {
  void* handle = nullptr;
  check(H5Fget_vfd_handle(id_.get(), H5P_DEFAULT, &handle), path_, "H5Fget_vfd_handle");
  return *static_cast<int*>(handle);
}

// HDF5 1.10 does not survive a write that fails while it flushes its metadata (a full disk): the file cannot be closed
// any more, and touching it again crashes. So the blocks are taken from the file system before HDF5 needs them.
void File::reserve(std::int64_t bytes) {
  hsize_t size = 0;  // with what is not flushed
  check(H5Fget_filesize(id_.get(), &size), path_, "H5Fget_filesize");
  const std::int64_t needed = static_cast<std::int64_t>(size) + bytes + kMetadataSlack;
  if (needed <= reserved_) return;
  const std::int64_t until = needed + kMetadataSlack;
  rlimit limit{};
  int error = 0;
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      limit.rlim_cur < static_cast<rlim_t>(until)) {
    error = EFBIG;
  } else if (fallocate(descriptor(), FALLOC_FL_KEEP_SIZE, reserved_, until - reserved_) != 0) {
    error = errno;
  }
  if (error != 0 && error != EOPNOTSUPP && error != ENOSYS && error != EINTR) {
    throw CheckpointError(fmt::format("{}: {} more bytes cannot be reserved: {}", path_, bytes, std::strerror(error)));
  }
  reserved_ = until;
}

void File::close() {
  const Api api;
  reserve(0);
  writing_ = false;
  check(H5Fclose(id_.release()), path_, "H5Fclose");
  struct stat info;
  if (::stat(path_.c_str(), &info) == 0 &&
      ::truncate(path_.c_str(), info.st_size) != 0) {  // blocks beyond the end go back
    throw CheckpointError(fmt::format("{}: truncate: {}", path_, std::strerror(errno)));
  }
}

// Closing a file that could not be written would fail in just that way. Its descriptor is pointed at memory instead:
// what is left to flush goes there, and the close succeeds.
void File::abandon() noexcept {
  const Api api;
  writing_ = false;
  void* handle = nullptr;
  if (H5Fget_vfd_handle(id_.get(), H5P_DEFAULT, &handle) >= 0 && handle) {
    const int memory = memfd_create("annulus-abandoned", MFD_CLOEXEC);
    if (memory >= 0) {
      dup2(memory, *static_cast<int*>(handle));
      ::close(memory);
    }
  }
  H5Fclose(id_.release());
}

void File::write_piece(const Piece& piece, const void* data, const std::function<void()>& between) {
  const std::string name = piece.dataset(), where = path_ + ": " + name;
  const int rank = piece.global_shape.rank();
  const Rect& r = piece.rect;
  const auto chunk = chunk_of(r.rows, r.cols, static_cast<std::int64_t>(size_of(piece.dtype)));
  const std::int64_t num_chunks = (r.rows + chunk[0] - 1) / chunk[0] * ((r.cols + chunk[1] - 1) / chunk[1]);
  Id dataset, type;
  {
    const Api api;
    reserve(num_chunks * chunk[0] * chunk[1] * static_cast<std::int64_t>(size_of(piece.dtype)));
    type = type_of(piece.dtype, where);
    const Id create = make_list(H5P_DATASET_CREATE, where);
    check(H5Pset_chunk(create.get(), rank, dims_of(chunk[0], chunk[1]).data()), where, "H5Pset_chunk");
    // The default fill time stays: it fills nothing, as no fill value is set. With H5D_FILL_TIME_NEVER HDF5 1.10.8
    // loses, silently, what is written past its cache into a dataset of one chunk (libver latest).
    const Id space = space_of(rank, dims_of(r.rows, r.cols), where), groups = making_groups(where);
    dataset =
        Id(check(H5Dcreate2(id_.get(), name.c_str(), type.get(), space.get(), groups.get(), create.get(), H5P_DEFAULT),
                 where, "H5Dcreate2"),
           close_dataset);
    attach_numbers(dataset, "offset", rank, r.row, r.col, where);
    attach_numbers(dataset, "global_shape", rank, piece.global_shape[0], columns_of(piece.global_shape), where);
    attach_text(dataset, "dtype", name_of(piece.dtype), where);
  }
  const auto* bytes = static_cast<const char*>(data);
  for (std::int64_t row = 0; row < r.rows; row += chunk[0]) {
    for (std::int64_t col = 0; col < r.cols; col += chunk[1]) {
      const Rect block{row, col, std::min(chunk[0], r.rows - row), std::min(chunk[1], r.cols - col)};
      if (between && (row > 0 || col > 0)) between();
      const Api api;
      const Id memory = space_of(rank, dims_of(block.rows, block.cols), where);
      const Id space(check(H5Dget_space(dataset.get()), where, "H5Dget_space"), close_space);
      select(space, block, where);
      // A block is whole rows or a part of one row, so it is contiguous in memory.
      const char* from = bytes + (row * r.cols + col) * static_cast<std::int64_t>(size_of(piece.dtype));
      check(H5Dwrite(dataset.get(), type.get(), memory.get(), space.get(), H5P_DEFAULT, from), where, "H5Dwrite");
    }
  }
  const Api api;
  if (static_cast<std::int64_t>(H5Dget_storage_size(dataset.get())) < piece.bytes()) {
    throw CheckpointError(fmt::format("{}: H5Dwrite reported success, but the values are not stored", where));
  }
}

void File::write_virtual(const std::vector<Piece>& pieces, std::size_t first, std::size_t last) {
  const Api api;
  const Piece& head = pieces[first];
  const std::string name = "/" + head.group + "/" + head.tensor, where = path_ + ": " + name;
  const int rank = head.global_shape.rank();
  const Dims whole = dims_of(head.global_shape[0], columns_of(head.global_shape));
  reserve(static_cast<std::int64_t>(last - first) * 1024);
  const Id type = type_of(head.dtype, where), create = make_list(H5P_DATASET_CREATE, where);
  for (std::size_t i = first; i < last; ++i) {
    const Rect& r = pieces[i].rect;
    const Id target = space_of(rank, whole, where), source = space_of(rank, dims_of(r.rows, r.cols), where);
    select(target, r, where);
    check(H5Pset_virtual(create.get(), target.get(), pieces[i].file.c_str(), pieces[i].dataset().c_str(), source.get()),
          where, "H5Pset_virtual");
  }
  const Id space = space_of(rank, whole, where), groups = making_groups(where);
  const Id dataset(
      check(H5Dcreate2(id_.get(), name.c_str(), type.get(), space.get(), groups.get(), create.get(), H5P_DEFAULT),
            where, "H5Dcreate2"),
      close_dataset);
  attach_text(dataset, "dtype", name_of(head.dtype), where);
}

void File::write_attribute(const char* name, const std::string& text) {
  const Api api;
  reserve(static_cast<std::int64_t>(text.size()));
  attach_text(id_, name, text, path_);
}

std::vector<std::string> File::dataset_names(std::int64_t limit) const {
  const Api api;
  std::vector<std::string> out;
  const Id root(check(H5Gopen2(id_.get(), "/", H5P_DEFAULT), path_, "H5Gopen2"), close_group);
  collect(root.get(), "", 0, path_, limit, out);
  return out;
}

Dataset File::open_piece(const Piece& piece) const {
  const Api api;
  const std::string name = piece.dataset();
  const std::string where = fmt::format("{}: {}", path_, name);
  for (std::size_t slash = name.find('/', 1);; slash = name.find('/', slash + 1)) {
    require_hard_link(id_.get(), name.substr(0, slash).c_str(), where);
    if (slash == name.npos) break;
  }
  Dataset out;
  out.id_ = Id(check(H5Dopen2(id_.get(), name.c_str(), H5P_DEFAULT), where, "H5Dopen2"), close_dataset);
  out.dtype_ = piece.dtype;
  out.rank_ = piece.global_shape.rank();
  out.name_ = where;
  check_type_and_shape(out.id_, piece, where);
  check_storage(out.id_, piece, where);
  return out;
}

}  // namespace annulus::checkpoint::hdf5
