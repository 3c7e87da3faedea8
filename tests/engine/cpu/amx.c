// Emulates AMX's instructions for bfloat16 on processors that lack them: each ends in SIGILL, whose handler does what
// Intel's manual says of it (Software Developer's Manual, volume 2), for code that no other processor can test. What
// the manual forbids ends the process with status 99.
#define _GNU_SOURCE
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

enum { LOAD = 0x34B, STORE = 0x24B, ZERO = 0x349, CONFIGURE = 0x049, MULTIPLY = 0x25C };  // prefix and opcode

static __thread uint8_t tiles[8][16][64];
static __thread uint8_t config[64];
static long products;

static const int REGISTERS[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

long amx_products(void) { return products; }

static void require(int holds, const char *what) {
  if (holds) return;
  ssize_t ignored = write(2, what, strlen(what));
  (void)ignored;
  _exit(99);
}

static int rows(int tile) { return config[48 + tile]; }
static int width(int tile) { return config[16 + 2 * tile] | config[17 + 2 * tile] << 8; }

static float number(const uint8_t *place) {
  uint32_t bits = (uint32_t)(place[0] | place[1] << 8) << 16;
  if (!(bits & 0x7F800000)) bits &= 0x80000000;  // subnormal numbers are zeros
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static void configure(const uint8_t *table) {
  memset(tiles, 0, sizeof tiles);
  memcpy(config, table, 64);
  require(config[0] == 1 && config[1] == 0, "palette\n");
  for (int i = 2; i < 64; i++) require(config[i] == 0 || (i > 15 && i < 32) || (i > 47 && i < 56), "reserved\n");
  for (int t = 0; t < 8; t++) require(rows(t) <= 16 && width(t) <= 64 && !rows(t) == !width(t), "sizes\n");
}

static void multiply(int sums, int left, int right) {
  require(rows(left) == rows(sums) && width(right) == width(sums) && 4 * rows(right) == width(left), "shapes\n");
  for (int i = 0; i < rows(sums); i++)
    for (int j = 0; j < width(sums); j += 4) {
      float total, part = 0;
      for (int k = 0; k < rows(right); k++)
        for (int half = 0; half < 4; half += 2)
          part = fmaf(number(&tiles[left][i][4 * k + half]), number(&tiles[right][k][j + half]), part);
      memcpy(&total, &tiles[sums][i][j], 4);
      total += part;
      memcpy(&tiles[sums][i][j], &total, 4);
    }
  products++;
}

static void move(int tile, uint8_t *place, int64_t stride, int loads) {
  if (loads) memset(tiles[tile], 0, sizeof tiles[tile]);
  for (int i = 0; i < rows(tile); i++, place += stride)
    loads ? memcpy(tiles[tile][i], place, width(tile)) : memcpy(place, tiles[tile][i], width(tile));
}

static void emulate(int signal_number, siginfo_t *info, void *context) {
  greg_t *values = ((ucontext_t *)context)->uc_mcontext.gregs;
  const uint8_t *code = (const uint8_t *)values[REG_RIP];
  require(code[0] == 0xC4 && (code[1] & 31) == 2 && !(code[2] & 0x80), "not AMX\n");
  int r = !(code[1] & 0x80) << 3, x = !(code[1] & 0x40) << 3, b = !(code[1] & 0x20) << 3;
  int instruction = (code[2] & 3) << 8 | code[3], mod = code[4] >> 6, tile = (code[4] >> 3 & 7) | r, rm = code[4] & 7;
  int other = ~(code[2] >> 3) & 15;
  code += 5;
  if (mod == 3) {
    require(config[0] || instruction == CONFIGURE, "not configured\n");
    if (instruction == MULTIPLY) multiply(tile, rm | b, other);
    else if (instruction == ZERO) memset(tiles[tile], 0, sizeof tiles[tile]);
    else if (instruction == CONFIGURE) memset(config, 0, sizeof config);  // tilerelease
    else require(0, "unknown\n");
  } else {
    int64_t place = 0, stride = 0;
    if (rm == 4) {
      int base = (*code & 7), index = (*code >> 3 & 7) | x, scale = *code >> 6;
      code++;
      if (index != 4) stride = values[REGISTERS[index]] << scale;
      require(base != 5 || mod, "address\n");
      place = values[REGISTERS[base | b]];
    } else if (rm == 5 && !mod) {
      place = (int64_t)code + 4 + *(const int32_t *)code;
      code += 4;
    } else {
      place = values[REGISTERS[rm | b]];
    }
    if (mod == 1) place += *(const int8_t *)code++;
    if (mod == 2) place += *(const int32_t *)code, code += 4;
    if (instruction == CONFIGURE) configure((const uint8_t *)place);
    else {
      require(config[0] && (instruction == LOAD || instruction == STORE), "unknown\n");
      move(tile, (uint8_t *)place, stride, instruction == LOAD);
    }
  }
  values[REG_RIP] = (greg_t)code;
}

__attribute__((constructor)) static void begin(void) {
  struct sigaction action = {.sa_sigaction = emulate, .sa_flags = SA_SIGINFO | SA_NODEFER};
  sigaction(SIGILL, &action, 0);
}
