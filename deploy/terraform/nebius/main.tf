# A GPU cluster to accept: InfiniBand fabric, shared filesystem, managed Kubernetes, one group of GPU nodes.

locals {
  platform = {
    h100 = { platform = "gpu-h100-sxm", preset = "8gpu-128vcpu-1600gb" }
    h200 = { platform = "gpu-h200-sxm", preset = "8gpu-128vcpu-1600gb" }
  }[var.gpu_model]

  shared_folder = "/mnt/shared"

  # The filesystem is attached as a virtiofs device with its mount tag; every node mounts it at its start.
  cloud_init = yamlencode({
    users = [{
      name                = var.ssh_user
      sudo                = "ALL=(ALL) NOPASSWD:ALL"
      shell               = "/bin/bash"
      ssh_authorized_keys = [var.ssh_public_key]
    }]
    mounts = [["shared", local.shared_folder, "virtiofs", "defaults,nofail", "0", "2"]]
  })
}

resource "nebius_compute_v1_gpu_cluster" "infiniband" {
  parent_id         = var.project_id
  name              = "${var.name}-infiniband"
  infiniband_fabric = var.infiniband_fabric
}

resource "nebius_compute_v1_filesystem" "shared" {
  parent_id      = var.project_id
  name           = "${var.name}-shared"
  type           = "NETWORK_SSD"
  size_gibibytes = var.filesystem_gib
}

resource "nebius_mk8s_v1_cluster" "cluster" {
  parent_id = var.project_id
  name      = var.name

  control_plane = {
    subnet_id = var.subnet_id
    version   = var.kubernetes_version
    endpoints = {
      public_endpoint = { allowed_cidrs = var.api_allowed_cidrs }
    }
  }
}

# Operators (GPU, network, Kueue) and seatrial's reports need nodes without GPUs.
resource "nebius_mk8s_v1_node_group" "cpu" {
  parent_id        = nebius_mk8s_v1_cluster.cluster.id
  name             = "${var.name}-cpu"
  version          = var.kubernetes_version
  fixed_node_count = var.cpu_node_count

  template = {
    resources          = { platform = "cpu-d3", preset = "4vcpu-16gb" }
    boot_disk          = { type = "NETWORK_SSD", size_gibibytes = 128 }
    network_interfaces = [{ subnet_id = var.subnet_id }]
  }
}

resource "nebius_mk8s_v1_node_group" "gpu" {
  parent_id        = nebius_mk8s_v1_cluster.cluster.id
  name             = "${var.name}-gpu"
  version          = var.kubernetes_version
  fixed_node_count = var.gpu_node_count

  template = {
    resources          = local.platform
    gpu_cluster        = { id = nebius_compute_v1_gpu_cluster.infiniband.id }
    gpu_settings       = { drivers_preset = var.drivers_preset }
    boot_disk          = { type = "NETWORK_SSD", size_gibibytes = 512 }
    network_interfaces = [{ subnet_id = var.subnet_id }]

    filesystems = [{
      attach_mode         = "READ_WRITE"
      mount_tag           = "shared"
      existing_filesystem = { id = nebius_compute_v1_filesystem.shared.id }
    }]

    # Capacity that was reserved; without reservations the nodes are on demand.
    reservation_policy = {
      policy          = length(var.reservation_ids) > 0 ? "STRICT" : "FORBID"
      reservation_ids = length(var.reservation_ids) > 0 ? var.reservation_ids : null
    }

    # No pod without a toleration starts on a node before it is accepted.
    taints = var.taint_until_accepted ? [{
      key    = "seatrial.dev/not-accepted"
      value  = "true"
      effect = "NO_SCHEDULE"
    }] : null

    cloud_init_user_data = local.cloud_init
  }

  # seatrial sets the condition Accepted to FALSE on a node that it rejects; the node is replaced after the timeout.
  auto_repair = var.replace_rejected_nodes ? {
    conditions = [{
      type    = "seatrial.dev/Accepted"
      status  = "FALSE"
      timeout = var.replace_rejected_after
    }]
  } : null
}
