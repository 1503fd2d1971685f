// memtorture drives every way in which memory of a guest can be touched, with
// seeded random operations on regions of every kind, and knows at any time
// what each byte has to be. All threads sleep together between rounds, so that
// an evictor that waits for an idle sandbox gets its chance, and shorter naps
// fall in the middle of what a pass does.
//
//   memtorture --seconds=30 --threads=3 --mb=48 --seed=1 --tmpfs=/dev/shm --overlay=/tmp

#include "guest.h"

#include <arpa/inet.h>
#include <linux/aio_abi.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <poll.h>
#include <spawn.h>
#include <sys/sendfile.h>
#include <sys/socket.h>

extern char **environ;

#define MAXREG 12
#define XFER 8  // most pages moved by one transfer

struct thread {
  int id;
  struct rng g;
  struct region reg[MAXREG];
  int nreg;
  int pipefd[2], unixfd[2], tcpfd[2];
  int memfd_self;     // /proc/self/mem
  int scratch_file;   // a tmpfs file that transfers go through
  aio_context_t aio;
  uint8_t *scratch;   // XFER pages
  uint8_t *altstack;
  uint8_t *code;      // pages of code
  uint32_t code_val[16];
  struct {
    uint8_t *p;
    size_t n;
    uint64_t h;
  } heap[48];
  uint64_t ops;
  const char *op;  // what it does now, for the watchdog
};

static struct thread *threads;
static int nthreads;
static pthread_barrier_t barrier;
static atomic_int stop_flag;
static atomic_long round_sleep_ms;
static const char *tmpfs_dir, *overlay_dir;
static uint64_t exe_sum;

// ---- small helpers ---------------------------------------------------------

static struct region *pick(struct thread *t) { return &t->reg[below(&t->g, t->nreg)]; }

static void nap(struct thread *t) {
  if (below(&t->g, 20) == 0) sleep_ms(below(&t->g, 60));
}

// wait_ok waits for a child that must exit with 0; it has printed why if not.
static void wait_ok(pid_t pid, const char *what) {
  int st;
  while (waitpid(pid, &st, 0) < 0) must(errno == EINTR, "waitpid");
  if (!(WIFEXITED(st) && WEXITSTATUS(st) == 0)) fail("%s: child ended with status %#x", what, st);
}

static int is_locked(const struct region *r, size_t i) {
  return i >= r->lock_at && i < r->lock_at + r->lock_n;
}

// ---- operations on one region ----------------------------------------------

static void op_write(struct thread *t, struct region *r) {
  for (size_t k = 1 + below(&t->g, 12); k--;) page_write(r, below(&t->g, r->n));
}

static void op_write_run(struct thread *t, struct region *r) {
  size_t i = below(&t->g, r->n), k = 1 + below(&t->g, 64);
  for (; k-- && i < r->n; i++) page_write(r, i);
}

static void op_patch(struct thread *t, struct region *r) {
  for (size_t k = 1 + below(&t->g, 24); k--;) page_patch(r, below(&t->g, r->n));
}

static void op_read(struct thread *t, struct region *r) {
  for (size_t k = 1 + below(&t->g, 24); k--;) page_verify(r, below(&t->g, r->n), "load");
}

static void op_read_run(struct thread *t, struct region *r) {
  size_t i = below(&t->g, r->n), k = 1 + below(&t->g, 64);
  for (; k-- && i < r->n; i++) page_verify(r, i, "load");
}

static void op_alias(struct thread *t, struct region *r) {
  if (!r->alias) return;
  for (size_t k = 1 + below(&t->g, 12); k--;) {
    size_t i = below(&t->g, r->n);
    if (below(&t->g, 3) == 0) {
      // Write through the second mapping, read through the first.
      struct page *pg = &r->pg[i];
      pg->key = mix(r->seed ^ (i + 1));
      pg->ver = new_version();
      pg->patches = pg->cut = 0;
      page_content(r->alias + i * PAGE, pg);
      page_verify(r, i, "load after write through alias");
    } else {
      page_check(r->alias + i * PAGE, &r->pg[i], r->name, i, "alias load");
    }
  }
}

static void op_dontneed(struct thread *t, struct region *r) {
  size_t i = below(&t->g, r->n), k = 1 + below(&t->g, 32);
  if (r->kind == R_SPARSE) k = 1;
  if (i + k > r->n) k = r->n - i;
  for (size_t j = i; j < i + k; j++)
    if (is_locked(r, j)) return;  // refused on locked memory
  must(madvise(page_at(r, i), k * PAGE, MADV_DONTNEED) == 0, "madvise DONTNEED");
  for (size_t j = i; j < i + k; j++) {
    // Private memory is gone and reads as zeros; shared memory keeps its
    // content and merely loses the mapping.
    if (region_private(r)) memset(&r->pg[j], 0, sizeof r->pg[j]);
    if (below(&t->g, 2)) page_verify(r, j, "load after DONTNEED");
  }
}

static void op_remap_hole(struct thread *t, struct region *r) {
  if (r->kind != R_PRIVATE || r->lock_n) return;
  size_t i = below(&t->g, r->n), k = 1 + below(&t->g, 32);
  if (i + k > r->n) k = r->n - i;
  must(munmap(page_at(r, i), k * PAGE) == 0, "munmap");
  void *p = mmap(page_at(r, i), k * PAGE, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  must(p == page_at(r, i), "mmap into a hole");
  for (size_t j = i; j < i + k; j++) {
    memset(&r->pg[j], 0, sizeof r->pg[j]);
    if (below(&t->g, 4) == 0) page_verify(r, j, "load of a new mapping");
    if (below(&t->g, 4) == 0) page_patch(r, j);
  }
}

static void op_mremap(struct thread *t, struct region *r) {
  if (r->kind != R_PRIVATE || r->lock_n) return;
  size_t n = r->n;
  switch (below(&t->g, 3)) {
    case 0:
      n = r->n + 1 + below(&t->g, 64);
      break;
    case 1:
      n = r->n - below(&t->g, r->n / 4);
      break;
  }
  if (n > 4096 || n < 32) return;
  void *p;
  if (below(&t->g, 2)) {
    uint8_t *to = mmap(NULL, n * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    must(to != MAP_FAILED, "mmap");
    p = mremap(r->base, r->n * PAGE, n * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to);
  } else {
    p = mremap(r->base, r->n * PAGE, n * PAGE, MREMAP_MAYMOVE);
  }
  must(p != MAP_FAILED, "mremap");
  r->base = p;
  if (n != r->n) {
    r->pg = realloc(r->pg, n * sizeof *r->pg);
    must(r->pg, "realloc");
    if (n > r->n) memset(r->pg + r->n, 0, (n - r->n) * sizeof *r->pg);
    r->n = n;
  }
  for (size_t k = 1 + below(&t->g, 24); k--;)
    page_verify(r, below(&t->g, r->n), "load after mremap");
  page_verify(r, r->n - 1, "load after mremap");
}

static void op_mprotect(struct thread *t, struct region *r) {
  size_t i = below(&t->g, r->n), k = 1 + below(&t->g, 16);
  if (r->kind == R_SPARSE) k = 1;
  if (i + k > r->n) k = r->n - i;
  uint8_t *p = page_at(r, i);
  int none = below(&t->g, 2);
  must(mprotect(p, k * PAGE, none ? PROT_NONE : PROT_READ) == 0, "mprotect");
  nap(t);
  uint8_t *q = p + below(&t->g, k) * PAGE + below(&t->g, PAGE);
  int rs = access_signal(q, 0), ws = access_signal(q, 1);
  if (rs != (none ? SIGSEGV : 0) || ws != SIGSEGV)
    fail("%s: mprotect(%s): read raised %d, write raised %d", r->name, none ? "NONE" : "READ", rs, ws);
  if (!none) page_verify(r, i + below(&t->g, k), "load of a read-only page");
  must(mprotect(p, k * PAGE, PROT_READ | PROT_WRITE) == 0, "mprotect");
  for (size_t j = i; j < i + k; j++) {
    page_verify(r, j, "load after mprotect");
    if (below(&t->g, 3) == 0) page_patch(r, j);
  }
}

static void op_mlock(struct thread *t, struct region *r) {
  if (r->kind == R_SPARSE) return;
  if (r->lock_n) {
    must(munlock(r->base + r->lock_at * PAGE, r->lock_n * PAGE) == 0, "munlock");
    r->lock_n = 0;
    return;
  }
  size_t i = below(&t->g, r->n), k = 1 + below(&t->g, 4);
  if (i + k > r->n) k = r->n - i;
  if (mlock(r->base + i * PAGE, k * PAGE) != 0) {
    must(errno == EPERM || errno == ENOMEM || errno == EAGAIN, "mlock");
    unsupported("mlock");
    return;
  }
  r->lock_at = i;
  r->lock_n = k;
  for (size_t j = i; j < i + k; j++) page_verify(r, j, "load of a locked page");
}

static void op_msync(struct thread *t, struct region *r) {
  (void)t;
  if (!region_file(r)) return;
  must(msync(r->base, r->n * PAGE, below(&t->g, 2) ? MS_SYNC : MS_ASYNC) == 0, "msync");
}

// op_truncate shrinks the file under a mapping and lets it grow again. What was
// cut off reads as zeros afterwards, never as the old bytes.
static void op_truncate(struct thread *t, struct region *r) {
  if (!region_file(r) || r->lock_n) return;
  size_t m = r->n - 1 - below(&t->g, r->n / 3);
  size_t cut = below(&t->g, 2) ? below(&t->g, PAGE) : 0;
  must(ftruncate(r->fd, m * PAGE + cut) == 0, "ftruncate");
  size_t beyond = m + (cut ? 1 : 0);
  if (beyond < r->n && below(&t->g, 2)) {
    int s = access_signal(r->base + beyond * PAGE, below(&t->g, 2));
    if (s != SIGBUS) fail("%s: access beyond the end of file raised %d, want SIGBUS", r->name, s);
  }
  nap(t);
  must(ftruncate(r->fd, r->n * PAGE) == 0, "ftruncate");
  if (cut) {
    struct page *pg = &r->pg[m];
    if (!pg->cut || pg->cut > cut) pg->cut = cut;
  }
  for (size_t j = beyond; j < r->n; j++) memset(&r->pg[j], 0, sizeof r->pg[j]);
  for (size_t j = m; j < r->n; j++) {
    if (below(&t->g, 2)) page_verify(r, j, "load after regrowth");
    if (below(&t->g, 4) == 0) page_patch(r, j);
  }
}

static void op_punch(struct thread *t, struct region *r) {
  if (!region_file(r)) return;
  size_t i = below(&t->g, r->n), k = 1 + below(&t->g, 16);
  if (i + k > r->n) k = r->n - i;
  if (fallocate(r->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, i * PAGE, k * PAGE) != 0) {
    must(errno == EOPNOTSUPP || errno == ENOSYS, "fallocate punch");
    unsupported("punch-hole");
    must(fallocate(r->fd, 0, i * PAGE, k * PAGE) == 0 || errno == EOPNOTSUPP, "fallocate");
  } else {
    for (size_t j = i; j < i + k; j++) memset(&r->pg[j], 0, sizeof r->pg[j]);
  }
  for (size_t j = i; j < i + k; j++) page_verify(r, j, "load after fallocate");
}

// op_file uses read(2) and write(2) on the file under a mapping.
static void op_file(struct thread *t, struct region *r) {
  if (!region_file(r)) return;
  for (size_t k = 1 + below(&t->g, 6); k--;) {
    size_t i = below(&t->g, r->n);
    switch (below(&t->g, 3)) {
      case 0:
        must(pread(r->fd, t->scratch, PAGE, i * PAGE) == (ssize_t)PAGE, "pread");
        page_check(t->scratch, &r->pg[i], r->name, i, "pread");
        break;
      case 1: {
        struct page *pg = &r->pg[i];
        pg->key = mix(r->seed ^ (i + 1));
        pg->ver = new_version();
        pg->patches = pg->cut = 0;
        page_content(t->scratch, pg);
        // In two pieces, so that a write covers part of an evicted page.
        size_t h = below(&t->g, PAGE);
        must(pwrite(r->fd, t->scratch, h, i * PAGE) == (ssize_t)h, "pwrite");
        must(pwrite(r->fd, t->scratch + h, PAGE - h, i * PAGE + h) == (ssize_t)(PAGE - h), "pwrite");
        page_verify(r, i, "load after pwrite");
        break;
      }
      case 2: {
        // A read that straddles pages.
        if (i + 1 >= r->n) break;
        uint8_t want[2 * PAGE];
        page_content(want, &r->pg[i]);
        page_content(want + PAGE, &r->pg[i + 1]);
        size_t o = below(&t->g, PAGE);
        must(pread(r->fd, t->scratch, PAGE, i * PAGE + o) == (ssize_t)PAGE, "pread");
        if (memcmp(t->scratch, want + o, PAGE))
          fail("%s page %zu+%zu: an unaligned pread returned wrong bytes", r->name, i, o);
        break;
      }
    }
  }
}

// op_private_file maps a file privately: pages that are not written follow the
// file, written ones stay apart from it.
static void op_private_file(struct thread *t, struct region *r) {
  if (!region_file(r)) return;
  size_t k = 2 + below(&t->g, 30), i = below(&t->g, r->n);
  if (i + k > r->n) k = r->n - i;
  uint8_t *p = mmap(NULL, k * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, r->fd, i * PAGE);
  must(p != MAP_FAILED, "mmap private");
  struct page own = {mix(rnd(&t->g)), new_version(), 0, 0};
  size_t w = below(&t->g, k);
  page_content(p + w * PAGE, &own);
  nap(t);
  size_t s = below(&t->g, k);
  struct page old = r->pg[i + s];
  page_write(r, i + s);
  for (size_t j = 0; j < k; j++) {
    const struct page *want = j == w ? &own : &r->pg[i + j];
    if (j == s && j != w) {
      // Whether a later write to the file shows in a private page that was not
      // written yet is left open; a mixture of both never is.
      uint8_t b[PAGE];
      page_content(b, &old);
      if (!memcmp(b, p + j * PAGE, PAGE)) want = &old;
    }
    page_check(p + j * PAGE, want, r->name, i + j, "private file mapping");
  }
  page_verify(r, i + w, "file under a private mapping");
  must(munmap(p, k * PAGE) == 0, "munmap");
}

// ---- transfers -------------------------------------------------------------

enum method {
  M_MEMCPY, M_PIPE, M_UNIX, M_TCP, M_VMREADV, M_VMWRITEV, M_MEM_READ, M_MEM_WRITE, M_FILE,
  M_SPLICE, M_AIO, M_SENDFILE, M_VMSPLICE, M_MAX
};
static const char *const method_names[] = {
    "memcpy", "pipe", "unix socket", "tcp", "process_vm_readv", "process_vm_writev",
    "/proc/self/mem read", "/proc/self/mem write", "file", "splice", "aio", "sendfile", "vmsplice"};

// iov_split cuts n pages into odd pieces.
static int iov_split(struct thread *t, struct iovec *iov, int max, uint8_t **pages, size_t n) {
  int k = 0;
  for (size_t i = 0; i < n; i++) {
    size_t h = k + 2 * (int)(n - i) <= max && below(&t->g, 2) ? below(&t->g, PAGE - 1) + 1 : PAGE;
    iov[k++] = (struct iovec){pages[i], h};
    if (h < PAGE) iov[k++] = (struct iovec){pages[i] + h, PAGE - h};
  }
  return k;
}

// iov_all repeats a vectored call until everything has gone through.
static void iov_all(ssize_t (*f)(int, const struct iovec *, int), int fd, struct iovec *iov, int n,
                    const char *what) {
  while (n) {
    ssize_t r = f(fd, iov, n);
    if (r < 0 && errno == EINTR) fail("%s: EINTR without a signal", what);
    must(r > 0, what);
    while (n && (size_t)r >= iov->iov_len) {
      r -= iov->iov_len;
      iov++;
      n--;
    }
    if (n) {
      iov->iov_base = (uint8_t *)iov->iov_base + r;
      iov->iov_len -= r;
    }
  }
}

static ssize_t msg_send(int fd, const struct iovec *iov, int n) {
  struct msghdr m = {.msg_iov = (struct iovec *)iov, .msg_iovlen = n};
  return sendmsg(fd, &m, 0);
}

static ssize_t msg_recv(int fd, const struct iovec *iov, int n) {
  struct msghdr m = {.msg_iov = (struct iovec *)iov, .msg_iovlen = n};
  return recvmsg(fd, &m, 0);
}

static void aio_page(struct thread *t, uint8_t *p, int op, size_t slot) {
  struct iocb cb, *cbs[1] = {&cb};
  memset(&cb, 0, sizeof cb);
  cb.aio_fildes = t->scratch_file;
  cb.aio_lio_opcode = op;
  cb.aio_buf = (uintptr_t)p;
  cb.aio_nbytes = PAGE;
  cb.aio_offset = slot * PAGE;
  must(syscall(SYS_io_submit, t->aio, 1L, cbs) == 1, "io_submit");
  struct io_event ev;
  long r;
  while ((r = syscall(SYS_io_getevents, t->aio, 1L, 1L, &ev, NULL)) != 1)
    must(r < 0 && errno == EINTR, "io_getevents");
  if (ev.res != (int64_t)PAGE) fail("aio op %d returned %lld", op, (long long)ev.res);
}

// op_transfer moves pages of one region into pages of another by one of the
// kernel's ways to copy memory. The model moves with them.
static void op_transfer(struct thread *t, struct region *src) {
  struct region *dst = pick(t);
  size_t n = 1 + below(&t->g, XFER);
  size_t si[XFER], di[XFER];
  uint8_t *sp[XFER], *dp[XFER];
  struct page model[XFER];
  for (size_t i = 0; i < n; i++) {
    // Sources in the lower half, destinations in the upper, so that a transfer
    // within one region never reads what it has just written.
    si[i] = below(&t->g, src->n / 2);
    di[i] = dst->n / 2 + below(&t->g, dst->n - dst->n / 2);
    for (size_t j = 0; j < i; j++)
      if (di[j] == di[i]) {
        n = i;
        goto drawn;
      }
    sp[i] = page_at(src, si[i]);
    dp[i] = page_at(dst, di[i]);
    model[i] = src->pg[si[i]];
  }
drawn:
  if (n == 0) return;
  enum method m = below(&t->g, M_MAX);
  struct iovec a[2 * XFER], b[2 * XFER];
  int na = iov_split(t, a, 2 * XFER, sp, n), nb = iov_split(t, b, 2 * XFER, dp, n);
  t->op = method_names[m];
  switch (m) {
    case M_MEMCPY:
      for (size_t i = 0; i < n; i++) memcpy(dp[i], sp[i], PAGE);
      break;
    case M_PIPE:
      iov_all(writev, t->pipefd[1], a, na, "writev to pipe");
      nap(t);
      iov_all(readv, t->pipefd[0], b, nb, "readv from pipe");
      break;
    case M_UNIX:
      iov_all(msg_send, t->unixfd[0], a, na, "sendmsg on unix socket");
      nap(t);
      iov_all(msg_recv, t->unixfd[1], b, nb, "recvmsg on unix socket");
      break;
    case M_TCP:
      if (t->tcpfd[0] < 0) return;
      iov_all(msg_send, t->tcpfd[0], a, na, "sendmsg on tcp");
      nap(t);
      iov_all(msg_recv, t->tcpfd[1], b, nb, "recvmsg on tcp");
      break;
    case M_VMREADV:
    case M_VMWRITEV: {
      ssize_t r = m == M_VMREADV ? process_vm_readv(getpid(), b, nb, a, na, 0)
                                 : process_vm_writev(getpid(), a, na, b, nb, 0);
      must(r == (ssize_t)(n * PAGE), method_names[m]);
      break;
    }
    case M_MEM_READ:
      for (size_t i = 0; i < n; i++)
        must(pread(t->memfd_self, dp[i], PAGE, (uintptr_t)sp[i]) == (ssize_t)PAGE, "/proc/self/mem");
      break;
    case M_MEM_WRITE:
      for (size_t i = 0; i < n; i++) {
        ssize_t r = pwrite(t->memfd_self, sp[i], PAGE, (uintptr_t)dp[i]);
        if (r < 0 && i == 0) {
          unsupported("proc-mem-write");
          return;
        }
        must(r == (ssize_t)PAGE, "write to /proc/self/mem");
      }
      break;
    case M_FILE:
      for (size_t i = 0; i < n; i++) {
        must(pwrite(t->scratch_file, sp[i], PAGE, i * PAGE) == (ssize_t)PAGE, "pwrite");
        nap(t);
        must(pread(t->scratch_file, dp[i], PAGE, i * PAGE) == (ssize_t)PAGE, "pread");
      }
      break;
    case M_SPLICE:
      // tmpfs file -> pipe -> memory
      for (size_t i = 0; i < n; i++) {
        must(pwrite(t->scratch_file, sp[i], PAGE, i * PAGE) == (ssize_t)PAGE, "pwrite");
        loff_t o = i * PAGE;
        for (size_t left = PAGE; left;) {
          ssize_t r = splice(t->scratch_file, &o, t->pipefd[1], NULL, left, 0);
          must(r > 0, "splice");
          left -= r;
        }
        struct iovec v = {dp[i], PAGE};
        iov_all(readv, t->pipefd[0], &v, 1, "readv from pipe");
      }
      break;
    case M_AIO:
      if (!t->aio) return;
      for (size_t i = 0; i < n; i++) {
        aio_page(t, sp[i], IOCB_CMD_PWRITE, i);
        aio_page(t, dp[i], IOCB_CMD_PREAD, i);
      }
      break;
    case M_SENDFILE:
      for (size_t i = 0; i < n; i++) {
        must(pwrite(t->scratch_file, sp[i], PAGE, i * PAGE) == (ssize_t)PAGE, "pwrite");
        off_t o = i * PAGE;
        for (size_t left = PAGE; left;) {
          ssize_t r = sendfile(t->unixfd[0], t->scratch_file, &o, left);
          must(r > 0, "sendfile");
          left -= r;
        }
        struct iovec v = {dp[i], PAGE};
        iov_all(msg_recv, t->unixfd[1], &v, 1, "recvmsg after sendfile");
      }
      break;
    case M_VMSPLICE: {
      for (int i = 0; i < na; i++) {
        ssize_t r = vmsplice(t->pipefd[1], &a[i], 1, 0);
        if (r < 0 && i == 0) {
          unsupported("vmsplice");
          return;
        }
        must(r == (ssize_t)a[i].iov_len, "vmsplice");
      }
      iov_all(readv, t->pipefd[0], b, nb, "readv after vmsplice");
      break;
    }
    case M_MAX:
      break;
  }
  for (size_t i = 0; i < n; i++) {
    page_verify(src, si[i], "load of a transfer's source");
    dst->pg[di[i]] = model[i];
    page_check(dp[i], &model[i], dst->name, di[i], method_names[m]);
  }
}

// ---- processes -------------------------------------------------------------

// child_body runs in a forked child: it must see the parent's memory as it was,
// whatever the parent does meanwhile, and its own writes on top.
static void child_body(struct thread *t, struct region *r, const uint32_t *vers, const size_t *idx,
                       size_t n, int depth) {
  nap(t);
  for (size_t k = 24; k--;) {
    size_t i = below(&t->g, r->n);
    if (region_private(r)) page_verify(r, i, "load in a child");
  }
  pid_t grand = 0;
  if (depth > 0 && below(&t->g, 3) == 0) {
    grand = fork();
    must(grand >= 0, "fork");
    if (grand == 0) {
      t->g.s ^= 0x5555;
      if (region_private(r)) {
        child_body(t, r, vers, idx, n, depth - 1);
        page_patch(r, below(&t->g, r->n));
        region_verify(r, "load in a grandchild");
      }
      _exit(0);
    }
  }
  for (size_t k = 0; k < n; k++) {
    struct page *pg = &r->pg[idx[k]];
    pg->key = mix(r->seed ^ (idx[k] + 1));
    pg->ver = vers[k];
    pg->patches = pg->cut = 0;
    page_content(page_at(r, idx[k]), pg);
    if (k % 8 == 0) nap(t);
  }
  for (size_t k = 0; k < n; k++) page_verify(r, idx[k], "load of a child's own write");
  if (region_private(r)) region_verify(r, "load in a child");
  if (grand) wait_ok(grand, "nested fork");
}

static void op_fork(struct thread *t, struct region *r) {
  size_t n = 1 + below(&t->g, 24), idx[24];
  uint32_t vers[24];
  // The child's pages are even ones, the parent's odd: in shared regions both
  // write at the same time. In private ones the parent writes all of them.
  for (size_t k = 0; k < n; k++) {
    idx[k] = below(&t->g, r->n / 2) * 2;
    vers[k] = new_version();
    for (size_t j = 0; j < k; j++)
      if (idx[j] == idx[k]) {
        n = k;
        break;
      }
  }
  pid_t pid = fork();
  must(pid >= 0, "fork");
  if (pid == 0) {
    t->g.s ^= 0xaaaa;
    child_body(t, r, vers, idx, n, 2);
    _exit(0);
  }
  for (size_t k = 1 + below(&t->g, 24); k--;) {
    size_t i = below(&t->g, r->n / 2) * 2 + 1;
    if (region_private(r) && below(&t->g, 2)) i = idx[below(&t->g, n)];
    if (i >= r->n) continue;
    if (below(&t->g, 2))
      page_patch(r, i);
    else
      page_write(r, i);
    if (k % 8 == 0) nap(t);
  }
  // mlock does not pass to the child, and the parent's lock must survive it.
  wait_ok(pid, r->name);
  if (!region_private(r))
    for (size_t k = 0; k < n; k++)
      r->pg[idx[k]] = (struct page){mix(r->seed ^ (idx[k] + 1)), vers[k], 0, 0};
  region_verify(r, "load after fork");
}

// arg_text is the k-th argument given to a program started from cold memory.
static void arg_text(char *buf, size_t n, uint64_t seed, int k) {
  gen_text((uint8_t *)buf, n - 1, mix(seed + k));
  buf[n - 1] = 0;
}

#define NARG 24
#define ARGLEN 3000

static int argcheck(int argc, char **argv) {
  uint64_t seed = strtoull(argv[2], NULL, 0);
  char want[ARGLEN];
  if (argc != NARG + 3) fail("argcheck: %d arguments", argc);
  for (int k = 0; k < NARG; k++) {
    arg_text(want, ARGLEN, seed, k);
    if (strcmp(want, argv[3 + k])) fail("argcheck: argument %d is wrong", k);
  }
  return 0;
}

static void op_exec(struct thread *t, struct region *r) {
  (void)r;
  uint64_t seed = rnd(&t->g);
  char num[32], *argv[NARG + 4];
  uint8_t *mem = mmap(NULL, NARG * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  must(mem != MAP_FAILED, "mmap");
  snprintf(num, sizeof num, "%llu", (unsigned long long)seed);
  argv[0] = "memtorture";
  argv[1] = "--argcheck";
  argv[2] = num;
  for (int k = 0; k < NARG; k++) {
    argv[3 + k] = (char *)mem + k * PAGE;
    arg_text(argv[3 + k], ARGLEN, seed, k);
  }
  argv[NARG + 3] = NULL;
  nap(t);
  pid_t pid;
  if (below(&t->g, 2)) {
    // posix_spawn uses vfork semantics: parent and child share the memory.
    int e = posix_spawn(&pid, "/proc/self/exe", NULL, NULL, argv, environ);
    if (e) fail("posix_spawn: %s", strerror(e));
  } else {
    pid = fork();
    must(pid >= 0, "fork");
    if (pid == 0) {
      execv("/proc/self/exe", argv);
      die("execv");
    }
  }
  wait_ok(pid, "exec");
  must(munmap(mem, NARG * PAGE) == 0, "munmap");
}

static long futex(atomic_int *a, int op, int val, const struct timespec *ts) {
  return syscall(SYS_futex, a, op, val, ts, NULL, 0);
}

// op_futex passes a page back and forth between processes with futexes that
// live in the shared page's neighbour.
static void op_futex(struct thread *t, struct region *r) {
  (void)r;
  uint8_t *m = mmap(NULL, 3 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  must(m != MAP_FAILED, "mmap");
  atomic_int *turn = (atomic_int *)(m + PAGE + 128);
  const int rounds = 10 + below(&t->g, 20);
  uint64_t seed = rnd(&t->g);
  const struct timespec limit = {120, 0};
  pid_t pid = fork();
  must(pid >= 0, "fork");
  int me = pid == 0;
  struct rng g = {seed + me};
  for (int i = 0; i < rounds; i++) {
    while (atomic_load(turn) != 2 * i + me)
      if (futex(turn, FUTEX_WAIT, 2 * i + !me, &limit) < 0 && errno == ETIMEDOUT)
        fail("futex: a wake was lost (round %d, value %d)", i, atomic_load(turn));
    if (i || me) {
      struct page pg = {seed, 2 * i + me, 0, 0};
      page_check(m, &pg, "futex page", 0, "load in the other process");
    }
    struct page pg = {seed, 2 * i + me + 1, 0, 0};
    page_content(m, &pg);
    if (below(&g, 6) == 0) sleep_ms(below(&g, 40));
    atomic_store(turn, 2 * i + me + 1);
    futex(turn, FUTEX_WAKE, 1, NULL);
  }
  if (pid == 0) _exit(0);
  wait_ok(pid, "futex");
  must(munmap(m, 3 * PAGE) == 0, "munmap");
}

// ---- stacks, signals, code, heap -------------------------------------------

static __attribute__((noinline)) void deep(struct thread *t, uint64_t seed, int depth) {
  volatile uint8_t frame[PAGE + 200];
  struct page pg = {seed + depth, 1, 0, 0};
  page_content((uint8_t *)frame, &pg);
  if (depth)
    deep(t, seed, depth - 1);
  else
    sleep_ms(below(&t->g, 30));
  page_check((const void *)frame, &pg, "stack", depth, "load of a stack frame");
}

static void op_stack(struct thread *t, struct region *r) {
  (void)r;
  deep(t, rnd(&t->g), 8 + below(&t->g, 120));
}

static __thread volatile uint64_t alt_seed;
static __thread volatile int alt_runs;

static void on_usr1(int sig) {
  (void)sig;
  uint8_t frame[PAGE];
  struct page pg = {alt_seed, 1, 0, 0};
  page_content(frame, &pg);
  page_check(frame, &pg, "signal stack", 0, "load");
  alt_runs++;
}

// op_signal lets the kernel write a signal frame to a cold stack.
static void op_signal(struct thread *t, struct region *r) {
  (void)r;
  alt_seed = rnd(&t->g);
  alt_runs = 0;
  must(syscall(SYS_tgkill, getpid(), (pid_t)syscall(SYS_gettid), SIGUSR1) == 0, "tgkill");
  if (alt_runs != 1) fail("signal handler ran %d times", alt_runs);
}

static void code_write(struct thread *t, int i) {
  uint8_t *p = t->code + i * PAGE;
  uint32_t v = rnd(&t->g);
  gen_text(p, PAGE, v);
  p[0] = 0xb8;  // mov eax, imm32
  memcpy(p + 1, &v, 4);
  p[5] = 0xc3;  // ret
  t->code_val[i] = v;
}

// op_code runs generated code that lies in pages of its own: instruction
// fetches from evicted pages.
static void op_code(struct thread *t, struct region *r) {
  (void)r;
  int i = below(&t->g, 16);
  if (below(&t->g, 4) == 0) code_write(t, i);
  uint32_t (*f)(void);
  void *p = t->code + i * PAGE;
  memcpy(&f, &p, sizeof f);
  uint32_t v = f();
  if (v != t->code_val[i]) fail("generated code %d returned %#x, want %#x", i, v, t->code_val[i]);
}

static void heap_check(struct thread *t, int i) {
  uint64_t h = t->heap[i].h;
  uint8_t want[512];
  gen_random(want, sizeof want, h | 1);
  size_t n = t->heap[i].n < sizeof want ? t->heap[i].n : sizeof want;
  if (t->heap[i].p && (memcmp(t->heap[i].p, want, n & ~7UL) ||
                       memcmp(t->heap[i].p + t->heap[i].n - (n & ~7UL), want, n & ~7UL)))
    fail("heap block %d of %zu bytes at %p is wrong", i, t->heap[i].n, (void *)t->heap[i].p);
}

static void op_heap(struct thread *t, struct region *r) {
  (void)r;
  int i = below(&t->g, 48);
  heap_check(t, i);
  if (t->heap[i].p && below(&t->g, 2)) {
    free(t->heap[i].p);
    t->heap[i].p = NULL;
    return;
  }
  size_t n = 16 + below(&t->g, below(&t->g, 4) ? 4000 : 300000);
  uint64_t h = t->heap[i].h = rnd(&t->g);
  uint8_t *p = t->heap[i].p = realloc(t->heap[i].p, n);
  must(p, "realloc");
  t->heap[i].n = n;
  uint8_t want[512];
  gen_random(want, sizeof want, h | 1);
  size_t m = (n < sizeof want ? n : sizeof want) & ~7UL;
  memcpy(p, want, m);
  memcpy(p + n - m, want, m);
  // The head wins where head and tail overlap, so write it last and keep such
  // blocks short enough for the tail to be the same bytes.
  if (n < 2 * sizeof want) {
    t->heap[i].n = m;
    memcpy(p, want, m);
  }
}

static void *short_thread(void *arg) {
  uint8_t frame[2 * PAGE];
  uint64_t seed = (uintptr_t)arg;
  struct page a = {seed, 1, 0, 0}, b = {seed, 2, 0, 0};
  page_content(frame, &a);
  page_content(frame + PAGE, &b);
  sleep_ms(seed % 50);
  page_check(frame, &a, "thread stack", 0, "load");
  page_check(frame + PAGE, &b, "thread stack", 1, "load");
  return arg;
}

static void op_threads(struct thread *t, struct region *r) {
  (void)r;
  pthread_t th[3];
  void *arg[3], *ret;
  for (int i = 0; i < 3; i++) {
    arg[i] = (void *)(uintptr_t)rnd(&t->g);
    int e = pthread_create(&th[i], NULL, short_thread, arg[i]);
    if (e) fail("pthread_create: %s", strerror(e));
  }
  for (int i = 0; i < 3; i++) {
    pthread_join(th[i], &ret);
    if (ret != arg[i]) fail("a thread returned the wrong value");
  }
}

static uint64_t sum_bytes(const uint8_t *p, size_t n) {
  uint64_t h = 1469598103934665603ULL;
  for (size_t i = 0; i + 8 <= n; i += 8) {
    uint64_t v;
    memcpy(&v, p + i, 8);
    h = (h ^ v) * 1099511628211ULL;
  }
  return h;
}

// op_exe compares the program's own file, mapped and read: page cache of a file
// of the root filesystem.
static void op_exe(struct thread *t, struct region *r) {
  (void)r;
  int fd = open("/proc/self/exe", O_RDONLY);
  must(fd >= 0, "open /proc/self/exe");
  struct stat st;
  must(fstat(fd, &st) == 0, "fstat");
  uint64_t s;
  if (below(&t->g, 2)) {
    uint8_t *p = mmap(NULL, st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    must(p != MAP_FAILED, "mmap /proc/self/exe");
    s = sum_bytes(p, st.st_size);
    munmap(p, st.st_size);
  } else {
    uint8_t *p = malloc(st.st_size);
    must(p && pread(fd, p, st.st_size, 0) == st.st_size, "pread /proc/self/exe");
    s = sum_bytes(p, st.st_size);
    free(p);
  }
  close(fd);
  if (s != exe_sum) fail("/proc/self/exe has changed: %llx, was %llx", (unsigned long long)s,
                         (unsigned long long)exe_sum);
}

// ---- driving ---------------------------------------------------------------

static const struct {
  const char *name;
  void (*f)(struct thread *, struct region *);
  int weight;
} ops[] = {
    {"write", op_write, 8},       {"write_run", op_write_run, 4}, {"patch", op_patch, 10},
    {"read", op_read, 8},         {"read_run", op_read_run, 4},   {"alias", op_alias, 5},
    {"dontneed", op_dontneed, 4}, {"remap", op_remap_hole, 3},    {"mremap", op_mremap, 4},
    {"mprotect", op_mprotect, 4}, {"mlock", op_mlock, 3},         {"msync", op_msync, 1},
    {"truncate", op_truncate, 5}, {"punch", op_punch, 2},         {"file", op_file, 6},
    {"privfile", op_private_file, 4}, {"transfer", op_transfer, 24}, {"fork", op_fork, 4},
    {"exec", op_exec, 1},         {"futex", op_futex, 1},         {"stack", op_stack, 2},
    {"signal", op_signal, 2},     {"code", op_code, 4},           {"heap", op_heap, 10},
    {"threads", op_threads, 1},   {"exe", op_exe, 1},
};
#define NOPS (sizeof ops / sizeof ops[0])
static atomic_ulong op_counts[NOPS];

static void tcp_pair(int fd[2]) {
  struct sockaddr_in sa = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t len = sizeof sa;
  fd[0] = fd[1] = -1;
  int l = socket(AF_INET, SOCK_STREAM, 0);
  if (l < 0 || bind(l, (void *)&sa, sizeof sa) || listen(l, 1) ||
      getsockname(l, (void *)&sa, &len)) {
    unsupported("tcp");
    if (l >= 0) close(l);
    return;
  }
  int c = socket(AF_INET, SOCK_STREAM, 0);
  must(c >= 0 && connect(c, (void *)&sa, sizeof sa) == 0, "connect");
  fd[1] = accept(l, NULL, NULL);
  must(fd[1] >= 0, "accept");
  fd[0] = c;
  close(l);
}

static void thread_setup(struct thread *t, int id, uint64_t seed, size_t pages) {
  t->id = id;
  t->g.s = mix(seed + 1000 * id);
  must(pipe(t->pipefd) == 0, "pipe");
  must(socketpair(AF_UNIX, SOCK_STREAM, 0, t->unixfd) == 0, "socketpair");
  tcp_pair(t->tcpfd);
  t->memfd_self = open("/proc/self/mem", O_RDWR);
  if (t->memfd_self < 0) t->memfd_self = open("/proc/self/mem", O_RDONLY);
  must(t->memfd_self >= 0, "open /proc/self/mem");
  char path[256];
  snprintf(path, sizeof path, "%s/scratch-%d-%d", tmpfs_dir, getpid(), id);
  t->scratch_file = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
  must(t->scratch_file >= 0 && unlink(path) == 0, path);
  if (syscall(SYS_io_setup, 8, &t->aio) != 0) {
    t->aio = 0;
    unsupported("aio");
  }
  t->scratch = map_or_die(XFER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  t->altstack = map_or_die(16, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  t->code = map_or_die(16, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  for (int i = 0; i < 16; i++) code_write(t, i);

  static const struct {
    enum region_kind kind;
    int share;  // in 32ths
  } plan[] = {{R_PRIVATE, 8}, {R_PRIVATE, 4}, {R_SHARED, 4}, {R_TMPFS, 4},
              {R_OVERLAY, 3}, {R_MEMFD, 4},   {R_SYSV, 3},   {R_SPARSE, 2}};
  for (size_t i = 0; i < sizeof plan / sizeof plan[0]; i++) {
    size_t n = pages * plan[i].share / 32;
    region_new(&t->reg[t->nreg++], plan[i].kind, n < 32 ? 32 : n, rnd(&t->g),
               plan[i].kind == R_OVERLAY ? overlay_dir : tmpfs_dir);
  }
}

static void thread_fill(struct thread *t) {
  for (int k = 0; k < t->nreg; k++)
    for (size_t i = 0; i < t->reg[k].n; i++)
      if (below(&t->g, 8)) page_write(&t->reg[k], i);
}

static void thread_verify(struct thread *t) {
  t->op = "verify";
  for (int k = 0; k < t->nreg; k++) region_verify(&t->reg[k], "full check");
  for (int i = 0; i < 48; i++) heap_check(t, i);
}

static void *thread_main(void *arg) {
  struct thread *t = arg;
  stack_t ss = {.ss_sp = t->altstack, .ss_size = 16 * PAGE};
  must(sigaltstack(&ss, NULL) == 0, "sigaltstack");
  int total = 0;
  for (size_t i = 0; i < NOPS; i++) total += ops[i].weight;
  thread_fill(t);
  for (;;) {
    pthread_barrier_wait(&barrier);  // the main thread has set the round up
    if (atomic_load(&stop_flag)) break;
    t->op = "sleep";
    sleep_ms(atomic_load(&round_sleep_ms));
    for (int k = 20 + below(&t->g, 80); k--;) {
      int w = below(&t->g, total);
      size_t i = 0;
      while (w >= ops[i].weight) w -= ops[i++].weight;
      t->op = ops[i].name;
      ops[i].f(t, pick(t));
      atomic_fetch_add(&op_counts[i], 1);
      t->ops++;
      nap(t);
    }
    if (below(&t->g, 4) == 0) thread_verify(t);
    t->op = "barrier";
    pthread_barrier_wait(&barrier);
  }
  thread_verify(t);
  return NULL;
}

int main(int argc, char **argv) {
  prog_name = "memtorture";
  if (argc > 2 && !strcmp(argv[1], "--argcheck")) return argcheck(argc, argv);
  long seconds = opt_num(argc, argv, "seconds", 20);
  uint64_t seed = opt_num(argc, argv, "seed", 1);
  long mb = opt_num(argc, argv, "mb", 48);
  nthreads = opt_num(argc, argv, "threads", 3);
  tmpfs_dir = opt_str(argc, argv, "tmpfs", "/dev/shm");
  overlay_dir = opt_str(argc, argv, "overlay", "/tmp");

  install_fault_handlers();
  struct sigaction sa;
  memset(&sa, 0, sizeof sa);
  sa.sa_handler = on_usr1;
  sa.sa_flags = SA_ONSTACK;
  must(sigaction(SIGUSR1, &sa, NULL) == 0, "sigaction");

  int fd = open("/proc/self/exe", O_RDONLY);
  struct stat st;
  must(fd >= 0 && fstat(fd, &st) == 0, "/proc/self/exe");
  uint8_t *exe = malloc(st.st_size);
  must(exe && pread(fd, exe, st.st_size, 0) == st.st_size, "pread /proc/self/exe");
  exe_sum = sum_bytes(exe, st.st_size);
  free(exe);
  close(fd);

  threads = calloc(nthreads, sizeof *threads);
  must(threads, "calloc");
  pthread_t *th = calloc(nthreads, sizeof *th);
  must(th, "calloc");
  pthread_barrier_init(&barrier, NULL, nthreads + 1);
  for (int i = 0; i < nthreads; i++) {
    thread_setup(&threads[i], i, seed, mb * 256 / nthreads);
    int e = pthread_create(&th[i], NULL, thread_main, &threads[i]);
    if (e) fail("pthread_create: %s", strerror(e));
  }
  struct rng g = {mix(seed ^ 77)};
  int64_t end = now_ns() + seconds * 1000000000LL;
  long rounds = 0;
  while (now_ns() < end) {
    // No sleep, one in the middle of a pass, or one that outlasts it.
    static const long lens[] = {0, 0, 40, 120, 500, 900};
    long l = lens[below(&g, 6)];
    atomic_store(&round_sleep_ms, l ? l / 2 + (long)below(&g, l) : 0);
    pthread_barrier_wait(&barrier);
    pthread_barrier_wait(&barrier);
    rounds++;
  }
  atomic_store(&stop_flag, 1);
  pthread_barrier_wait(&barrier);
  uint64_t total = 0;
  for (int i = 0; i < nthreads; i++) {
    pthread_join(th[i], NULL);
    total += threads[i].ops;
  }
  char counts[600];
  size_t n = 0;
  for (size_t i = 0; i < NOPS; i++)
    n += snprintf(counts + n, sizeof counts - n, " %s=%lu", ops[i].name, atomic_load(&op_counts[i]));
  printf("OK memtorture seed=%llu rounds=%ld ops=%llu unsupported=%s;%s\n", (unsigned long long)seed,
         rounds, (unsigned long long)total, unsupported_list(), counts);
  return 0;
}
