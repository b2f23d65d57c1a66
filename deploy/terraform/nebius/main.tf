# A GPU cluster to accept: InfiniBand fabric, shared filesystem, managed Kubernetes, one group of GPU nodes.
# With scheduler = "soperator" it has what the charts of soperator need (soperator.tf), and Slurm runs on it.

locals {
  platform = {
    h100 = { platform = "gpu-h100-sxm", preset = "8gpu-128vcpu-1600gb" }
    h200 = { platform = "gpu-h200-sxm", preset = "8gpu-128vcpu-1600gb" }
  }[var.gpu_model]

  is_soperator = var.scheduler == "soperator"

  # The filesystem is attached as a virtiofs device with its mount tag. Nodes mount it at their start; soperator's chart
  # mounts the device "jail" itself, and its root folder is the root folder of all Slurm nodes.
  mount_tag     = local.is_soperator ? "jail" : "shared"
  shared_folder = local.is_soperator ? "/" : "/mnt/shared"

  cloud_init = yamlencode({
    users = [{
      name                = var.ssh_user
      sudo                = "ALL=(ALL) NOPASSWD:ALL"
      shell               = "/bin/bash"
      ssh_authorized_keys = [var.ssh_public_key]
    }]
    mounts = local.is_soperator ? [] : [["shared", local.shared_folder, "virtiofs", "defaults,nofail", "0", "2"]]
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

# Operators (network, Kueue, soperator) and Slurm's controller run on nodes without GPUs.
resource "nebius_mk8s_v1_node_group" "cpu" {
  parent_id        = nebius_mk8s_v1_cluster.cluster.id
  name             = "${var.name}-cpu"
  version          = var.kubernetes_version
  fixed_node_count = var.cpu_node_count

  template = {
    resources          = { platform = "cpu-d3", preset = local.is_soperator ? "16vcpu-64gb" : "4vcpu-16gb" }
    boot_disk          = { type = "NETWORK_SSD", size_gibibytes = 128 }
    network_interfaces = [{ subnet_id = var.subnet_id }]

    # The pods of Slurm's controller and of its login node mount both.
    filesystems = local.is_soperator ? [
      {
        attach_mode         = "READ_WRITE"
        mount_tag           = local.mount_tag
        existing_filesystem = { id = nebius_compute_v1_filesystem.shared.id }
      },
      {
        attach_mode         = "READ_WRITE"
        mount_tag           = "controller-spool"
        existing_filesystem = { id = nebius_compute_v1_filesystem.controller_spool[0].id }
      }
    ] : null
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
      mount_tag           = local.mount_tag
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

  # A node whose condition seatrial.dev/Accepted is False is replaced after the timeout. docs/nebius.md sets the condition.
  auto_repair = var.replace_rejected_nodes ? {
    conditions = [{
      type    = "seatrial.dev/Accepted"
      status  = "FALSE"
      timeout = var.replace_rejected_after
    }]
  } : null
}

# The images of the GPU nodes have the drivers. The device plugin makes nvidia.com/gpu a resource of the nodes.
resource "nebius_applications_v1alpha1_k8s_release" "device_plugin" {
  parent_id        = var.project_id
  cluster_id       = nebius_mk8s_v1_cluster.cluster.id
  application_name = "nvidia-device-plugin"
  namespace        = "nvidia-device-plugin"
  product_slug     = "nebius/nvidia-device-plugin"
  depends_on       = [nebius_mk8s_v1_node_group.gpu]
}

resource "nebius_applications_v1alpha1_k8s_release" "network_operator" {
  parent_id        = var.project_id
  cluster_id       = nebius_mk8s_v1_cluster.cluster.id
  application_name = "network-operator"
  namespace        = "network-operator"
  product_slug     = "nebius/nvidia-network-operator"
  depends_on       = [nebius_mk8s_v1_node_group.cpu]
}
